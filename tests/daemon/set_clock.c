/* A time of day for one process: preloaded by LD_PRELOAD, it adds the seconds in the file that SET_CLOCK names, a
 * native 64-bit integer, to every reading of CLOCK_REALTIME. All other clocks are unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int (*ask)(clockid_t, struct timespec *);
static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void)
{
    ask = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int file = open(getenv("SET_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        abort();
    offset = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = ask(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME)
        now->tv_sec += *offset;
    return result;
}
