/* A libcuda.so.1 without a GPU: as much of NVIDIA's cuda.h as tells whether CUDA is initialised and under MPS.
 *
 * FAKE_CUDA_MPS is the value of attribute 133; without it, the driver is too old to know the attribute.
 */

#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, MPS_ENABLED = 133 };

static pid_t initialised;

static int state(void) { return initialised == getpid() ? SUCCESS : NOT_INITIALIZED; }

int cuInit(unsigned flags)
{
    if (initialised && initialised != getpid())
        return NOT_INITIALIZED; /* the child of a process that called it */
    initialised = getpid();
    return flags ? INVALID_VALUE : SUCCESS;
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return state();
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return state();
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    const char *mps = getenv("FAKE_CUDA_MPS");

    if (state() != SUCCESS)
        return state();
    if (attribute != MPS_ENABLED || device != 0 || mps == NULL)
        return INVALID_VALUE;
    *value = atoi(mps);
    return SUCCESS;
}
