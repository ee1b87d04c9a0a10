/* A libcuda.so.1 without a GPU: the functions of CUDA's driver API for tests/gpu/cuda.py, controlled by variables.
 *
 *   FAKE_CUDA_MEMORY=BYTES           device memory; larger allocations are refused
 *   FAKE_CUDA_MULTIPROCESSORS=N      multiprocessors that a launch runs on
 *   FAKE_CUDA_MPS=0|1                whether this is a client of MPS (attribute 133); an old driver does not know it
 *   FAKE_CUDA_FAIL=FUNCTION RESULT   this function returns this CUresult and does nothing
 *   FAKE_CUDA_HANG=FUNCTION          this function never returns, as in a wedge
 *
 * Invalid arguments end the process with a message, so that a wrong type in the client is detected.
 * "Compiling" is a search for the kernels' names in the text. Values and signatures are those of cuda.h.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, ILLEGAL_ADDRESS = 700 };
enum { MULTIPROCESSOR_COUNT = 16, MPS_ENABLED = 133, ALLOCATIONS = 1024, CONTEXTS = 8 };

static char context[CONTEXTS], module, busy, hold, fault; /* their addresses are the handles; context[0] is the primary one */
static pid_t initialized; /* by this process: a forked child has lost it */
static int sticky, exists[CONTEXTS], current = -1;
static uint64_t running; /* nanoseconds of the launched kernels that nothing has waited for */
static struct { uint64_t at; size_t size; int context; } allocation[ALLOCATIONS];

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "fake libcuda: %s\n", what);
        abort();
    }
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);
    return value == NULL ? otherwise : strtoull(value, NULL, 10);
}

/* The result that this function returns, before it does anything. */
static int result(const char *function, int needs_context)
{
    char name[64];
    int code;
    const char *fail = getenv("FAKE_CUDA_FAIL");
    const char *hang = getenv("FAKE_CUDA_HANG");
    while (hang != NULL && strcmp(hang, function) == 0)
        pause();
    if (fail != NULL && sscanf(fail, "%63s %d", name, &code) == 2 && strcmp(name, function) == 0)
        return code;
    if (initialized && initialized != getpid())
        return NOT_INITIALIZED;
    must(strcmp(function, "cuInit") == 0 || initialized, "not initialized");
    must(!needs_context || current >= 0, "no context");
    return needs_context ? sticky : SUCCESS;
}

#define BEGIN(needs_context)                             \
    do {                                                 \
        int code = result(__func__, needs_context);      \
        if (code != SUCCESS)                             \
            return code;                                 \
    } while (0)

static size_t in_use(void)
{
    size_t sum = 0;
    for (int i = 0; i < ALLOCATIONS; i++)
        sum += allocation[i].size;
    return sum;
}

static void must_be_held(uint64_t at, size_t size)
{
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocation[i].at == at && size <= allocation[i].size)
            return;
    must(0, "no device memory at this address, or not as much");
}

int cuInit(unsigned flags)
{
    BEGIN(0);
    must(flags == 0, "cuInit: flags");
    initialized = getpid();
    return SUCCESS;
}

int cuDriverGetVersion(int *version)
{
    BEGIN(0);
    *version = 12040;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
    BEGIN(0);
    must(ordinal == 0, "cuDeviceGet: ordinal");
    *device = 7;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device)
{
    BEGIN(0);
    must(device == 7, "cuDeviceGetName: device");
    snprintf(name, (size_t)size, "Fake GPU");
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN(0);
    must((attribute == MULTIPROCESSOR_COUNT || attribute == MPS_ENABLED) && device == 7, "cuDeviceGetAttribute");
    if (attribute == MPS_ENABLED) {
        if (getenv("FAKE_CUDA_MPS") == NULL)
            return INVALID_VALUE;
        *value = (int)number("FAKE_CUDA_MPS", 0);
        return SUCCESS;
    }
    *value = (int)number("FAKE_CUDA_MULTIPROCESSORS", 8);
    return SUCCESS;
}

static void forget(int which)
{
    exists[which] = 0;
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocation[i].size > 0 && allocation[i].context == which) {
            munmap((void *)(uintptr_t)allocation[i].at, allocation[i].size);
            allocation[i].at = allocation[i].size = 0;
        }
    if (current == which)
        current = -1;
}

static int number_of(const void *handle)
{
    for (int i = 0; i < CONTEXTS; i++)
        if (handle == &context[i] && exists[i])
            return i;
    must(0, "no such context");
    return -1;
}

int cuCtxCreate_v2(void **new, unsigned flags, int device)
{
    BEGIN(0);
    must(flags == 0 && device == 7, "cuCtxCreate_v2");
    for (int i = 1; i < CONTEXTS; i++)
        if (!exists[i]) {
            exists[i] = 1;
            current = i;
            *new = &context[i];
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

int cuCtxDestroy_v2(void *which)
{
    BEGIN(0);
    must(which != &context[0], "cuCtxDestroy_v2: it is the primary context");
    forget(number_of(which));
    return SUCCESS;
}

int cuCtxSetCurrent(void *which)
{
    BEGIN(0);
    current = number_of(which);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **primary, int device)
{
    BEGIN(0);
    must(device == 7, "cuDevicePrimaryCtxRetain: device");
    exists[0] = 1;
    *primary = &context[0];
    return SUCCESS;
}

int cuDevicePrimaryCtxReset_v2(int device)
{
    BEGIN(0);
    must(device == 7, "cuDevicePrimaryCtxReset_v2: device");
    forget(0);
    return SUCCESS;
}

int cuCtxSynchronize(void)
{
    BEGIN(1);
    struct timespec left = {(time_t)(running / 1000000000), (long)(running % 1000000000)};
    nanosleep(&left, NULL);
    running = 0;
    return SUCCESS;
}

int cuModuleLoadData(void **new, const void *image)
{
    BEGIN(1);
    must(strstr(image, ".entry busy(.param .u64 seen, .param .u32 rounds)") != NULL, "cuModuleLoadData: busy");
    must(strstr(image, ".entry hold(.param .u64 nanoseconds)") != NULL, "cuModuleLoadData: hold");
    must(strstr(image, ".entry fault()") != NULL, "cuModuleLoadData: fault");
    *new = &module;
    return SUCCESS;
}

int cuModuleGetFunction(void **new, void *of, const char *name)
{
    BEGIN(1);
    must(of == &module, "cuModuleGetFunction: module");
    must(strcmp(name, "busy") == 0 || strcmp(name, "hold") == 0 || strcmp(name, "fault") == 0,
         "cuModuleGetFunction: name");
    *new = name[0] == 'b' ? &busy : name[0] == 'h' ? &hold : &fault;
    return SUCCESS;
}

int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    BEGIN(1);
    must(gx > 0 && gy == 1 && gz == 1 && by == 1 && bz == 1, "cuLaunchKernel: grid");
    must(bx > 0 && bx <= 1024 && shared == 0 && stream == NULL && extra == NULL, "cuLaunchKernel: launch");
    if (kernel == &fault) {
        sticky = ILLEGAL_ADDRESS; /* every later call in this context returns it */
        return SUCCESS;
    }
    unsigned multiprocessors = (unsigned)number("FAKE_CUDA_MULTIPROCESSORS", 8);
    if (kernel == &hold) {
        must(gx == multiprocessors, "cuLaunchKernel: a block for each multiprocessor");
        running += *(uint64_t *)parameters[0];
        return SUCCESS;
    }
    must(kernel == &busy, "cuLaunchKernel: kernel");
    uint64_t seen = *(uint64_t *)parameters[0];
    must_be_held(seen, 4 * multiprocessors);
    must(*(uint32_t *)parameters[1] > 0, "cuLaunchKernel: rounds");
    for (unsigned i = 0; i < multiprocessors; i++)
        ((uint32_t *)(uintptr_t)seen)[i] = 2 * i + 1;
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free_, size_t *total)
{
    BEGIN(1);
    *total = number("FAKE_CUDA_MEMORY", 0);
    *free_ = *total - in_use();
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t *at, size_t size)
{
    BEGIN(1);
    must(size > 0, "cuMemAlloc_v2: size");
    if (in_use() + size > number("FAKE_CUDA_MEMORY", 0))
        return OUT_OF_MEMORY;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    must(memory != MAP_FAILED, "cuMemAlloc_v2: mmap");
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocation[i].size == 0) {
            allocation[i].at = *at = (uint64_t)(uintptr_t)memory;
            allocation[i].size = size;
            allocation[i].context = current;
            return SUCCESS;
        }
    must(0, "cuMemAlloc_v2: more than there is room for");
    return OUT_OF_MEMORY;
}

int cuMemFree_v2(uint64_t at)
{
    BEGIN(1);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (at != 0 && allocation[i].at == at) {
            munmap((void *)(uintptr_t)at, allocation[i].size);
            allocation[i].at = allocation[i].size = 0;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

int cuMemsetD32_v2(uint64_t at, unsigned value, size_t count)
{
    BEGIN(1);
    must_be_held(at, 4 * count);
    for (size_t i = 0; i < count; i++)
        ((uint32_t *)(uintptr_t)at)[i] = value;
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    BEGIN(1);
    must_be_held(from, size);
    memcpy(to, (void *)(uintptr_t)from, size);
    return SUCCESS;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
            : code == NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : NULL;
    return *name == NULL ? INVALID_VALUE : SUCCESS;
}
