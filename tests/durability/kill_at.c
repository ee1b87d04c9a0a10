/* Preloaded into mpsd: kills it by SIGKILL just before the N-th system call that changes one of its stores.
 *
 * A writing call can be torn: half of the data is written before the kill. A torn rename is whole: the kill comes just
 * after it. The library changes nothing else. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static long left;
static int torn, of_ends;

/* Arm the library: the N-th such call from now on is the last. With ENDS, the calls of the ends of clients count, and
 * no others. */
void kill_at(long n, int tear, int ends) {
    left = n;
    torn = tear;
    of_ends = ends;
}

static int is_store(const char *path) {
    if (of_ends)
        return strstr(path, "/ends/") != NULL;
    return strstr(path, "/leases.") || strstr(path, "/history.") || strstr(path, "/accounts.") ||
           strstr(path, "/last-event");
}

static int is_last(const char *path) { return left > 0 && is_store(path) && --left == 0; }

static int is_last_on(int fd) {
    char link[64], path[4096];
    ssize_t length;
    if (left <= 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_last(path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    if (is_last_on(fd)) {
        if (torn)
            syscall(SYS_pwrite64, fd, data, size / 2, offset);
        die();
    }
    return syscall(SYS_pwrite64, fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

int ftruncate64(int fd, off64_t size) {
    if (is_last_on(fd))
        die();
    return REAL(ftruncate64)(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int truncate64(const char *path, off64_t size) {
    if (is_last(path))
        die();
    return REAL(truncate64)(path, size);
}

int fsync(int fd) {
    if (is_last_on(fd))
        die();
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    if (is_last_on(fd))
        die();
    return REAL(fdatasync)(fd);
}

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    if (is_last_on(fd))
        die();
    return REAL(posix_fallocate64)(fd, offset, size);
}

int unlink(const char *path) {
    if (is_last(path))
        die();
    return REAL(unlink)(path);
}

int rename(const char *from, const char *to) {
    if (is_last(from)) {
        if (torn)
            REAL(rename)(from, to);
        die();
    }
    return REAL(rename)(from, to);
}
