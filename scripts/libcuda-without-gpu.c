/* A CUDA driver of a machine without GPUs, for scripts/check-cuda.sh. cuDNN only loads its engines if these functions
 * exist. Because there is no device, it compiles kernels for the described device and does not load them. */

enum { SUCCESS = 0, NO_DEVICE = 100 };

int cuDeviceGetCount(int *count) {
    *count = 0;
    return SUCCESS;
}

#define NEEDS_DEVICE(name) \
    int name(void) { return NO_DEVICE; }

NEEDS_DEVICE(cuInit)
NEEDS_DEVICE(cuCtxGetCurrent)
NEEDS_DEVICE(cuCtxGetLimit)
NEEDS_DEVICE(cuCtxPopCurrent)
NEEDS_DEVICE(cuCtxPushCurrent)
NEEDS_DEVICE(cuDeviceGet)
NEEDS_DEVICE(cuDriverGetVersion)
NEEDS_DEVICE(cuGetErrorName)
NEEDS_DEVICE(cuGetErrorString)
NEEDS_DEVICE(cuKernelGetAttribute)
NEEDS_DEVICE(cuKernelGetFunction)
NEEDS_DEVICE(cuKernelSetAttribute)
NEEDS_DEVICE(cuLaunchCooperativeKernel)
NEEDS_DEVICE(cuLaunchKernel)
NEEDS_DEVICE(cuLaunchKernelEx)
NEEDS_DEVICE(cuLibraryGetKernel)
NEEDS_DEVICE(cuLibraryLoadData)
NEEDS_DEVICE(cuLibraryLoadFromFile)
NEEDS_DEVICE(cuLibraryUnload)
NEEDS_DEVICE(cuLinkAddData)
NEEDS_DEVICE(cuLinkComplete)
NEEDS_DEVICE(cuLinkCreate)
NEEDS_DEVICE(cuLinkDestroy)
NEEDS_DEVICE(cuModuleGetFunction)
NEEDS_DEVICE(cuModuleLoadData)
NEEDS_DEVICE(cuModuleUnload)
NEEDS_DEVICE(cuOccupancyMaxPotentialClusterSize)
NEEDS_DEVICE(cuStreamGetCtx)
NEEDS_DEVICE(cuTensorMapEncodeIm2col)
NEEDS_DEVICE(cuTensorMapEncodeTiled)
