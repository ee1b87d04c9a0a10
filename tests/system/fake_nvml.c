/* A libnvidia-ml.so.1 without a GPU: the functions of NVML that mpsd calls, with answers from a file.
 *
 * Each call reads $FAKE_NVML/state, which is replaced by rename, so that GPUs change while a process observes them:
 *
 *   driver VERSION
 *   hardware GPU BRAND ARCHITECTURE BUS                        as numbers of nvml.h, and a text; without it, none is told
 *   cuda VERSION                                              as 13000; 0 if the driver does not report it
 *   condition GPU PERSISTENCE ECC RETIREMENT PENDING FAILED   -1 for a value that the GPU does not report, or no line
 *   gpu UUID MAJOR.MINOR MIG TOTAL RESERVED USED NAME...      MIG: 0, 1, or -1 if the GPU has no such mode
 *   process GPU Compute|MPSCompute PID BYTES                  BYTES: -1 for NVML_VALUE_NOT_AVAILABLE
 *   fault FUNCTION GPU|-1 RESULT                              RESULT: an nvmlReturn_t, or -1 to hang while it stands there
 *   clock GPU MHZ CELSIUS MILLIWATTS                          of the multiprocessors, and what the GPU takes; 0 without it
 *   activity GPU PERCENT WATTS                                utilization and enforced power limit; without it, none is told
 *   recovery GPU ACTION                                       an nvmlDeviceGpuRecoveryAction_t; without it, none is told
 *   xid GPU NUMBER                                            reported once, to who listens to this GPU; more come behind
 *
 * $FAKE_NVML/compute_mode-UUID has a GPU's nvmlComputeMode_t if it was ever set; it is replaced by rename, too.
 *
 * $FAKE_NVML/calls gets a line for each call: the thread's id and the function. Values and layouts are those of nvml.h.
 */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMED_OUT = 10 };
enum { ALL = -1, HANG = -1 };
enum { GPUS = 16, PROCESSES = 64, FAULTS = 16, XIDS = 128 };

struct gpu {
    char uuid[80], name[96];
    int major, minor, mig;
    unsigned long long total, reserved, used;
};

/* Persistence mode, uncorrected ECC errors, pending page retirements, pending row remappings, failed row remappings. */
enum { PERSISTENCE, ECC, RETIREMENT, REMAPPING_PENDING, REMAPPING_FAILED, CONDITIONS };

/* MHz, degrees Celsius, milliwatts. */
enum { CLOCK, TEMPERATURE, POWER, CLOCKS };

struct state {
    char driver[80];
    int gpus, processes, faults, xids, cuda;
    int condition[GPUS][CONDITIONS], recovery[GPUS], brand[GPUS], architecture[GPUS], utilization[GPUS], power_limit[GPUS];
    char bus[GPUS][32];
    unsigned clock[GPUS][CLOCKS];
    struct gpu gpu[GPUS];
    struct { int gpu; char kind[16]; unsigned pid; unsigned long long bytes; } process[PROCESSES];
    struct { char function[64]; int gpu, result; } fault[FAULTS];
    struct { int gpu; unsigned long long number; } xid[XIDS];
};

static int opened; /* the number of users */

static FILE *open_beside(const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_NVML"), name);
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        perror(path);
        abort();
    }
    return file;
}

static void read_state(struct state *s)
{
    char line[512];
    FILE *file = open_beside("state", "re");
    memset(s, 0, sizeof *s);
    memset(s->condition, -1, sizeof s->condition);
    memset(s->recovery, -1, sizeof s->recovery);
    memset(s->utilization, -1, sizeof s->utilization);
    memset(s->power_limit, -1, sizeof s->power_limit);
    while (fgets(line, sizeof line, file) != NULL) {
        struct gpu *g = &s->gpu[s->gpus];
        int p = s->processes, f = s->faults, x = s->xids, of[1 + CONDITIONS];
        unsigned c[CLOCKS];
        char bus[32];
        if (sscanf(line, "driver %79s", s->driver) == 1 || sscanf(line, "cuda %d", &s->cuda) == 1)
            continue;
        if (sscanf(line, "clock %d %u %u %u", &of[0], &c[CLOCK], &c[TEMPERATURE], &c[POWER]) == 4 && of[0] >= 0 &&
            of[0] < GPUS) {
            memcpy(s->clock[of[0]], c, sizeof c);
            continue;
        }
        if (sscanf(line, "hardware %d %d %d %31s", &of[0], &of[1], &of[2], bus) == 4 && of[0] >= 0 && of[0] < GPUS) {
            s->brand[of[0]] = of[1];
            s->architecture[of[0]] = of[2];
            memcpy(s->bus[of[0]], bus, sizeof bus);
            continue;
        }
        if (sscanf(line, "activity %d %d %d", &of[0], &of[1], &of[2]) == 3 && of[0] >= 0 && of[0] < GPUS) {
            s->utilization[of[0]] = of[1];
            s->power_limit[of[0]] = of[2];
            continue;
        }
        if (sscanf(line, "recovery %d %d", &of[0], &of[1]) == 2 && of[0] >= 0 && of[0] < GPUS) {
            s->recovery[of[0]] = of[1];
            continue;
        }
        if (sscanf(line, "condition %d %d %d %d %d %d", &of[0], &of[1], &of[2], &of[3], &of[4], &of[5]) == 6 &&
            of[0] >= 0 && of[0] < GPUS) {
            memcpy(s->condition[of[0]], &of[1], sizeof s->condition[0]);
            continue;
        }
        if (sscanf(line, "gpu %79s %d.%d %d %llu %llu %llu %95[^\n]", g->uuid, &g->major, &g->minor, &g->mig, &g->total,
                   &g->reserved, &g->used, g->name) == 8)
            s->gpus++;
        else if (sscanf(line, "process %d %15s %u %llu", &s->process[p].gpu, s->process[p].kind, &s->process[p].pid,
                        &s->process[p].bytes) == 4)
            s->processes++;
        else if (sscanf(line, "fault %63s %d %d", s->fault[f].function, &s->fault[f].gpu, &s->fault[f].result) == 3)
            s->faults++;
        else if (sscanf(line, "xid %d %llu", &s->xid[x].gpu, &s->xid[x].number) == 2)
            s->xids++;
        else {
            fprintf(stderr, "fake NVML cannot read: %s", line);
            abort();
        }
        if (s->gpus == GPUS || s->processes == PROCESSES || s->faults == FAULTS || s->xids == XIDS) {
            fprintf(stderr, "fake NVML has no room for: %s", line);
            abort();
        }
    }
    fclose(file);
}

/* Record the call; hang or fail if the state says so, otherwise return the state. */
static int enter(const char *function, int gpu, struct state *s)
{
    FILE *calls = open_beside("calls", "ae");
    fprintf(calls, "%d %s\n", (int)gettid(), function);
    fclose(calls);
again:
    read_state(s);
    for (int f = 0; f < s->faults; f++)
        if (strcmp(s->fault[f].function, function) == 0 && (s->fault[f].gpu == ALL || s->fault[f].gpu == gpu)) {
            if (s->fault[f].result != HANG)
                return s->fault[f].result;
            usleep(1000);
            goto again;
        }
    if (!opened && strcmp(function, "nvmlInitWithFlags") != 0)
        return UNINITIALIZED;
    return gpu < s->gpus ? SUCCESS : NOT_FOUND;
}

/* A handle is the GPU's index plus one, so that no handle is NULL. */
static int index_of(void *handle)
{
    return (int)(intptr_t)handle - 1;
}

#define ENTER(gpu)                                     \
    struct state s;                                    \
    do {                                               \
        int result = enter(__func__, (gpu), &s);       \
        if (result != SUCCESS)                         \
            return result;                             \
    } while (0)

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    ENTER(ALL);
    opened++;
    return SUCCESS;
}

int nvmlShutdown(void)
{
    ENTER(ALL);
    opened--;
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    struct state s;
    enter(__func__, ALL, &s);
    return result == SUCCESS ? "Success" : "an error that only NVML can name";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    ENTER(ALL);
    snprintf(version, length, "%s", s.driver);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER(ALL);
    *count = s.gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    ENTER((int)index);
    *handle = (void *)(intptr_t)(index + 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    ENTER(ALL);
    for (int index = 0; index < s.gpus; index++)
        if (strcmp(s.gpu[index].uuid, uuid) == 0) {
            *handle = (void *)(intptr_t)(index + 1);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    ENTER(index_of(handle));
    snprintf(uuid, length, "%s", s.gpu[index_of(handle)].uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    ENTER(index_of(handle));
    snprintf(name, length, "%s", s.gpu[index_of(handle)].name);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    ENTER(index_of(handle));
    *major = s.gpu[index_of(handle)].major;
    *minor = s.gpu[index_of(handle)].minor;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER(index_of(handle));
    if (s.gpu[index_of(handle)].mig < 0)
        return NOT_SUPPORTED;
    *current = s.gpu[index_of(handle)].mig;
    *pending = 1; /* the mode after the next reset, not the current one */
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER(ALL);
    *version = s.cuda;
    return s.cuda ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetBrand(void *handle, unsigned *brand)
{
    ENTER(index_of(handle));
    *brand = s.brand[index_of(handle)];
    return s.bus[index_of(handle)][0] ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetArchitecture(void *handle, unsigned *architecture)
{
    ENTER(index_of(handle));
    *architecture = s.architecture[index_of(handle)];
    return s.bus[index_of(handle)][0] ? SUCCESS : NOT_SUPPORTED;
}

struct pci_info {
    char old_bus[16];
    unsigned domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *info)
{
    ENTER(index_of(handle));
    memset(info, 0, sizeof *info);
    memcpy(info->bus_id, s.bus[index_of(handle)], sizeof info->bus_id);
    return s.bus[index_of(handle)][0] ? SUCCESS : NOT_SUPPORTED;
}

#define CONDITION(value, what)                             \
    do {                                                   \
        ENTER(index_of(handle));                           \
        if (s.condition[index_of(handle)][what] < 0)       \
            return NOT_SUPPORTED;                          \
        *(value) = s.condition[index_of(handle)][what];    \
    } while (0)

int nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode)
{
    CONDITION(mode, PERSISTENCE);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *count)
{
    if (type != 1 || counter != 0) /* uncorrected errors since the driver was loaded */
        return INVALID_ARGUMENT;
    CONDITION(count, ECC);
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending)
{
    CONDITION(pending, RETIREMENT);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    *corrected = *uncorrected = 0;
    CONDITION(pending, REMAPPING_PENDING);
    CONDITION(failed, REMAPPING_FAILED);
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};

struct utilization {
    unsigned gpu, memory;
};

int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *clock)
{
    ENTER(index_of(handle));
    (void)type;
    *clock = s.clock[index_of(handle)][CLOCK];
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature)
{
    ENTER(index_of(handle));
    (void)sensor;
    *temperature = s.clock[index_of(handle)][TEMPERATURE];
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *power)
{
    ENTER(index_of(handle));
    *power = s.clock[index_of(handle)][POWER];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *rates)
{
    ENTER(index_of(handle));
    rates->gpu = s.utilization[index_of(handle)];
    rates->memory = 0;
    return s.utilization[index_of(handle)] < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *limit)
{
    ENTER(index_of(handle));
    *limit = s.power_limit[index_of(handle)] * 1000;
    return s.power_limit[index_of(handle)] < 0 ? NOT_SUPPORTED : SUCCESS;
}

/* Version 1 counts the driver's reserve as used. */
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    ENTER(index_of(handle));
    const struct gpu *g = &s.gpu[index_of(handle)];
    memory->total = g->total;
    memory->used = g->reserved + g->used;
    memory->free = g->total - memory->used;
    return SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    ENTER(index_of(handle));
    const struct gpu *g = &s.gpu[index_of(handle)];
    memory->total = g->total;
    memory->reserved = g->reserved;
    memory->used = g->used;
    memory->free = g->total - g->reserved - g->used;
    return SUCCESS;
}

struct process_info {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance, compute_instance;
};

/* Like NVML: a first call without room returns the number. */
static int list(const struct state *s, int gpu, const char *kind, unsigned *count, struct process_info *infos)
{
    unsigned room = *count, found = 0;
    for (int p = 0; p < s->processes; p++)
        if (s->process[p].gpu == gpu && strcmp(s->process[p].kind, kind) == 0) {
            if (found < room)
                infos[found] = (struct process_info){s->process[p].pid, s->process[p].bytes, UINT32_MAX, UINT32_MAX};
            found++;
        }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define LIST(function, kind)                                                         \
    int function(void *handle, unsigned *count, struct process_info *infos)          \
    {                                                                                \
        ENTER(index_of(handle));                                                     \
        return list(&s, index_of(handle), kind, count, infos);                       \
    }

LIST(nvmlDeviceGetComputeRunningProcesses_v2, "Compute")
LIST(nvmlDeviceGetComputeRunningProcesses_v3, "Compute")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "MPSCompute")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "MPSCompute")

enum { COMPUTE_MODES = 4 };

static void name_of_mode(const struct gpu *g, const char *suffix, char *path, size_t length)
{
    snprintf(path, length, "%s/compute_mode-%s%s", getenv("FAKE_NVML"), g->uuid, suffix);
}

int nvmlDeviceGetComputeMode(void *handle, unsigned *mode)
{
    char path[4096];
    ENTER(index_of(handle));
    name_of_mode(&s.gpu[index_of(handle)], "", path, sizeof path);
    FILE *file = fopen(path, "re");
    *mode = 0;
    if (file != NULL) {
        if (fscanf(file, "%u", mode) != 1)
            abort();
        fclose(file);
    }
    return SUCCESS;
}

int nvmlDeviceSetComputeMode(void *handle, unsigned mode)
{
    char new[4096], path[4096];
    ENTER(index_of(handle));
    if (mode >= COMPUTE_MODES)
        return INVALID_ARGUMENT;
    if (s.gpu[index_of(handle)].mig == 1)
        return NOT_SUPPORTED;
    name_of_mode(&s.gpu[index_of(handle)], ".new", new, sizeof new);
    name_of_mode(&s.gpu[index_of(handle)], "", path, sizeof path);
    FILE *file = fopen(new, "we");
    if (file == NULL || fprintf(file, "%u\n", mode) < 0 || fclose(file) != 0 || rename(new, path) != 0)
        abort();
    return SUCCESS;
}

enum { RECOVERY_ACTION = 230, UNSIGNED_INT = 1 };

struct field {
    unsigned id, scope;
    long long at, latency;
    unsigned type;
    int result;
    union { unsigned number; double widest; } value;
};

int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields)
{
    ENTER(index_of(handle));
    for (int field = 0; field < count; field++) {
        int action = fields[field].id == RECOVERY_ACTION ? s.recovery[index_of(handle)] : -1;
        fields[field].type = UNSIGNED_INT;
        fields[field].result = action < 0 ? NOT_SUPPORTED : SUCCESS;
        fields[field].value.number = (unsigned)action;
    }
    return SUCCESS;
}

/* There is one event set, represented by its address. */
static char event_set;
static int listened_to[GPUS], reported;

enum { XID_CRITICAL_ERROR = 8 };

struct event {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

int nvmlEventSetCreate(void **set)
{
    ENTER(ALL);
    *set = &event_set;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set)
{
    ENTER(index_of(handle));
    if (types != XID_CRITICAL_ERROR || set != &event_set)
        return NOT_SUPPORTED;
    listened_to[index_of(handle)] = 1;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned milliseconds)
{
    ENTER(ALL);
    if (set != &event_set)
        return NOT_FOUND;
    for (unsigned waited = 0;; waited++) {
        read_state(&s);
        for (; reported < s.xids; reported++)
            if (listened_to[s.xid[reported].gpu]) {
                *event = (struct event){(void *)(intptr_t)(s.xid[reported].gpu + 1), XID_CRITICAL_ERROR,
                                        s.xid[reported].number, UINT32_MAX, UINT32_MAX};
                reported++;
                return SUCCESS;
            }
        if (waited >= milliseconds)
            return TIMED_OUT;
        usleep(1000);
    }
}

int nvmlEventSetFree(void *set)
{
    ENTER(ALL);
    return set == &event_set ? SUCCESS : NOT_FOUND;
}
