// Names that all sources use. There are no headers: NVRTC compiles each source with this text in front.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

