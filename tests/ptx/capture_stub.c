/* Stands in for the CUDA runtime under the host code that the CuTe DSL exports: instead of
   launching, it keeps what would be launched. capture.py links it, registers the parameter sizes of
   each kernel and takes the launches. The structures are those of CUDA 13's driver_types.h, as far
   as they are read here. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned x, y, z;
} dim3_t;
typedef struct {
  unsigned id;
  char pad[4];
  union {
    char room[64];
    dim3_t cluster;
  } value;
} attribute_t;
typedef struct {
  dim3_t grid, block;
  size_t shared;
  void* stream;
  attribute_t* attributes;
  unsigned count;
} config_t;
enum { kClusterDimension = 4, kMaxSharedOptin = 97, kMultiprocessors = 16 };

typedef struct {
  char kernel[4096];
  uint32_t grid[3], block[3], cluster[3];
  uint64_t shared, bytes;
  uint8_t parameters[8192];
} launch_t;

static struct {
  const char* name;
  int count;
  int32_t sizes[256], offsets[256];
} kernels[16];
static int kernel_count, launch_count, multiprocessors = 148;
static launch_t launches[64];

void capture_reset(int sms) {
  kernel_count = launch_count = 0;
  multiprocessors = sms;
}
int capture_register(const char* name, const int32_t* sizes, const int32_t* offsets, int count) {
  if (kernel_count == 16 || count > 256) return 1;
  kernels[kernel_count].name = strdup(name);
  kernels[kernel_count].count = count;
  memcpy(kernels[kernel_count].sizes, sizes, 4 * count);
  memcpy(kernels[kernel_count].offsets, offsets, 4 * count);
  ++kernel_count;
  return 0;
}
int capture_count(void) { return launch_count; }
const launch_t* capture_launch(int i) { return &launches[i]; }

int _cudaLaunchKernelEx(const config_t* c, void* function, void** arguments) {
  if (launch_count == 64) return 2;
  launch_t* l = &launches[launch_count];
  memset(l, 0, sizeof *l);
  strncpy(l->kernel, (const char*)function, sizeof l->kernel - 1);
  const dim3_t one = {1, 1, 1};
  dim3_t cluster = one;
  for (unsigned i = 0; i < c->count; ++i)
    if (c->attributes[i].id == kClusterDimension) cluster = c->attributes[i].value.cluster;
  memcpy(l->grid, &c->grid, 12);
  memcpy(l->block, &c->block, 12);
  memcpy(l->cluster, &cluster, 12);
  l->shared = c->shared;
  for (int k = 0; k < kernel_count; ++k)
    if (strcmp(kernels[k].name, l->kernel) == 0) {
      for (int i = 0; i < kernels[k].count; ++i) {
        memcpy(l->parameters + kernels[k].offsets[i], arguments[i], kernels[k].sizes[i]);
        l->bytes = kernels[k].offsets[i] + kernels[k].sizes[i];
      }
      ++launch_count;
      return 0;
    }
  return 98; /* cudaErrorInvalidDeviceFunction */
}

/* What the exported code asks before it launches. */
int _cudaLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned n, void* c,
                         void* d, unsigned m) {
  *library = (void*)1;
  return 0;
}
int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = strdup(name);
  return 0;
}
int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  *value = 0;
  return 0;
}
int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == kMaxSharedOptin    ? 232448
           : attribute == kMultiprocessors ? multiprocessors
                                           : 1024;
  return 0;
}
int _cudaFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
  return 0;
}
int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int _cudaSetDevice(int device) { return 0; }
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
const char* cudaGetErrorName(int error) { return "cudaError"; }
const char* cudaGetErrorString(int error) { return "captured launch failed"; }
int cudaLibraryUnload(void* library) { return 0; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void* function, int code) { abort(); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void* function, int code) { abort(); }
