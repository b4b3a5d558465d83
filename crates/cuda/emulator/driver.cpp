// The CUDA driver API for a GPU that does not exist: its memory is the host's, and the host executes its operations.
//
// LOCKSTEP_EMULATED_STREAMS=now, the default, executes an operation when it is enqueued. With `late` a stream executes
// nothing until the host or another stream waits for it: whoever forgets to wait reads or overwrites memory too early.

#include "check.h"
#include "stream.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace emulated {

enum Status { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };

static long setting(const char* name, long otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atol(text) : otherwise;
}

static bool late() {
    static const bool late = [] {
        const char* mode = std::getenv("LOCKSTEP_EMULATED_STREAMS");
        return mode && std::string(mode) == "late";
    }();
    return late;
}

// ---- streams and events ----

typedef std::function<void()> Work;

struct Stream;

struct Event {
    // The latest record: the number of operations of the stream before it.
    Stream* stream = nullptr;
    std::uint64_t after = 0;
    std::chrono::steady_clock::time_point time;
};

struct Stream {
    std::recursive_mutex executing;
    std::deque<Work> waiting;
    std::atomic<std::uint64_t> issued = 0, executed = 0;
    std::vector<Work>* recording = nullptr;

    void enqueue(Work work) {
        std::lock_guard lock(mutex());
        if (recording) return recording->push_back(std::move(work));
        issued++;
        if (late()) return waiting.push_back(std::move(work));
        work();
        executed++;
    }

    // Executes the first `count` operations that were ever issued.
    void reach(std::uint64_t count) {
        if (executed >= count) return;
        std::lock_guard lock(mutex());
        while (executed < count && !waiting.empty()) {
            Work work = std::move(waiting.front());
            waiting.pop_front();
            // A stream that waits for this one finds the operation done when it is.
            work();
            executed++;
        }
    }

    void finish() { reach(issued); }

  private:
    // Late streams execute each other's operations, so that they share a lock.
    std::recursive_mutex& mutex() {
        static std::recursive_mutex all;
        return late() ? all : executing;
    }
};

// Streams that are not destroyed. The memory of a destroyed stream is not freed: events, and other threads that wait for
// all streams, may still look at it.
static std::mutex streams_lock;
static std::set<Stream*> streams;

static void finish_all() {
    std::vector<Stream*> all;
    {
        std::lock_guard lock(streams_lock);
        all.assign(streams.begin(), streams.end());
    }
    for (Stream* stream : all) stream->finish();
}

static void complete(const Event& event) {
    if (event.stream) event.stream->reach(event.after);
}

// ---- memory ----

struct Allocation {
    std::size_t bytes;
    int file; // by which other processes open it
};

static std::mutex memory_lock;
static std::map<std::uint64_t, Allocation> allocations;         // by address
static std::map<std::uint64_t, Allocation> physical;            // by handle
static std::map<std::uint64_t, std::size_t> pinned, mapped;     // by address
static std::size_t used = 0;

static std::size_t total_bytes() {
    static const std::size_t bytes = static_cast<std::size_t>(setting("LOCKSTEP_EMULATED_GIB", 16)) << 30;
    return bytes;
}

static int memory_file(std::size_t bytes) {
    const int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        close(file);
        return -1;
    }
    return file;
}

// New memory is not a number.
static void* map_file(int file, std::size_t bytes, void* at) {
    const int flags = MAP_SHARED | (at ? MAP_FIXED : 0);
    void* address = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    return address == MAP_FAILED ? nullptr : address;
}

bool find_device_memory(std::uint64_t address, std::uint64_t& from, std::uint64_t& to) {
    std::lock_guard lock(memory_lock);
    auto allocated = allocations.upper_bound(address);
    if (allocated != allocations.begin()) {
        --allocated;
        from = allocated->first, to = from + allocated->second.bytes;
        if (address < to) return true;
    }
    auto part = mapped.upper_bound(address);
    if (part == mapped.begin()) return false;
    --part;
    from = part->first, to = from + part->second;
    return address < to;
}

static bool is_pinned(const void* pointer) {
    std::lock_guard lock(memory_lock);
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    auto after = pinned.upper_bound(address);
    return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

static void copy(Stream* stream, void* to, const void* from, std::size_t bytes) {
    stream->enqueue([=] {
        std::memmove(to, from, bytes);
        emulated_written(to, bytes);
    });
}

// ---- kernels ----

struct Function {
    std::string name;
    const Kernel* kernel;
};

// Size of a shared library in memory: the table of sections is its end.
static std::size_t image_bytes(const void* image) {
    const auto* header = static_cast<const Elf64_Ehdr*>(image);
    if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return 0;
    return header->e_shoff + static_cast<std::size_t>(header->e_shentsize) * header->e_shnum;
}

// Arguments of a launch, aligned like the kernel expects.
struct Arguments {
    struct alignas(64) Unit {
        char bytes[64];
    };
    std::vector<Unit> units;
    explicit Arguments(std::size_t bytes) : units(bytes / sizeof(Unit) + 1) {}
    char* data() { return units.data()->bytes; }
};

} // namespace emulated

using namespace emulated;
typedef void* Handle;

static Stream* stream_of(Handle handle) {
    static Stream* first = [] {
        auto* stream = new Stream;
        std::lock_guard lock(streams_lock);
        streams.insert(stream);
        return stream;
    }();
    return handle ? static_cast<Stream*>(handle) : first;
}

extern "C" {

void emulated_enqueue(Handle stream, void (*run)(void*), void (*drop)(void*), void* state) {
    std::shared_ptr<void> owned(state, drop);
    stream_of(stream)->enqueue([run, owned] { run(owned.get()); });
}

// ---- the device ----

int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
int cuDeviceGetCount(int* count) {
    *count = static_cast<int>(setting("LOCKSTEP_EMULATED_GPUS", 1));
    return SUCCESS;
}
int cuDeviceGet(int* device, int index) {
    *device = index;
    return SUCCESS;
}
int cuDeviceGetName(char* name, int bytes, int) {
    std::snprintf(name, static_cast<std::size_t>(bytes), "Emulated GPU");
    return SUCCESS;
}
int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
    std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0", 0xE0 + device);
    return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 16: *value = 4; break;           // multiprocessors
    case 75: *value = 9; break;           // compute capability 9.0
    case 76: *value = 0; break;
    case 97: *value = 227 << 10; break;   // shared memory of a block
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
    *bytes = total_bytes();
    return SUCCESS;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    std::memcpy(uuid, "emulated GPU   ", 15);
    uuid[15] = static_cast<unsigned char>(device);
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(Handle* context, int device) {
    static char contexts[64];
    *context = &contexts[device % 64];
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxSetCurrent(Handle) { return SUCCESS; }
int cuCtxSynchronize() {
    finish_all();
    return SUCCESS;
}
int cuGetErrorName(int status, const char** name) {
    switch (status) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    default: *name = "CUDA_ERROR_UNKNOWN";
    }
    return SUCCESS;
}
int cuGetErrorString(int, const char** text) {
    *text = "an error of the emulated GPU";
    return SUCCESS;
}

// ---- memory ----

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
    std::lock_guard lock(memory_lock);
    *total = total_bytes();
    *free = *total - used;
    return SUCCESS;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
    std::lock_guard lock(memory_lock);
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > total_bytes() - used) return OUT_OF_MEMORY;
    const int file = memory_file(bytes);
    void* start = file < 0 ? nullptr : map_file(file, bytes, nullptr);
    if (!start) return OUT_OF_MEMORY;
    std::memset(start, 0xff, bytes);
    check_new(reinterpret_cast<std::uint64_t>(start), bytes);
    *address = reinterpret_cast<std::uint64_t>(start);
    allocations[*address] = {bytes, file};
    used += bytes;
    return SUCCESS;
}

int cuMemFree_v2(std::uint64_t address) {
    finish_all();
    std::lock_guard lock(memory_lock);
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), found->second.bytes);
    close(found->second.file);
    used -= found->second.bytes;
    allocations.erase(found);
    return SUCCESS;
}

int cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
    if (posix_memalign(pointer, 4096, bytes) != 0) return OUT_OF_MEMORY;
    std::lock_guard lock(memory_lock);
    pinned[reinterpret_cast<std::uint64_t>(*pointer)] = bytes;
    return SUCCESS;
}

int cuMemFreeHost(void* pointer) {
    finish_all();
    std::lock_guard lock(memory_lock);
    if (pinned.erase(reinterpret_cast<std::uint64_t>(pointer)) == 0) return INVALID_VALUE;
    std::free(pointer);
    return SUCCESS;
}

int cuMemAddressReserve(std::uint64_t* address, std::size_t bytes, std::size_t, std::uint64_t, std::uint64_t) {
    void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    *address = reinterpret_cast<std::uint64_t>(start);
    return SUCCESS;
}

int cuMemAddressFree(std::uint64_t address, std::size_t bytes) {
    munmap(reinterpret_cast<void*>(address), bytes);
    return SUCCESS;
}

int cuMemCreate(std::uint64_t* handle, std::size_t bytes, const void*, std::uint64_t) {
    std::lock_guard lock(memory_lock);
    if (bytes > total_bytes() - used) return OUT_OF_MEMORY;
    const int file = memory_file(bytes);
    if (file < 0) return OUT_OF_MEMORY;
    static std::uint64_t next = 1;
    *handle = next++;
    physical[*handle] = {bytes, file};
    used += bytes;
    return SUCCESS;
}

int cuMemRelease(std::uint64_t handle) {
    std::lock_guard lock(memory_lock);
    auto found = physical.find(handle);
    if (found == physical.end()) return INVALID_VALUE;
    close(found->second.file);
    used -= found->second.bytes;
    physical.erase(found);
    return SUCCESS;
}

int cuMemMap(std::uint64_t address, std::size_t bytes, std::size_t, std::uint64_t handle, std::uint64_t) {
    std::lock_guard lock(memory_lock);
    auto found = physical.find(handle);
    if (found == physical.end() || bytes > found->second.bytes) return INVALID_VALUE;
    void* start = map_file(found->second.file, bytes, reinterpret_cast<void*>(address));
    if (!start) return INVALID_VALUE;
    std::memset(start, 0xff, bytes);
    check_new(address, bytes);
    mapped[address] = bytes;
    return SUCCESS;
}

int cuMemUnmap(std::uint64_t address, std::size_t bytes) {
    {
        std::lock_guard lock(memory_lock);
        mapped.erase(address);
    }
    // The addresses stay reserved.
    void* start = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return start == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

int cuMemSetAccess(std::uint64_t, std::size_t, const void*, std::size_t) { return SUCCESS; }

int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void* from, std::size_t bytes, Handle stream) {
    auto* target = reinterpret_cast<void*>(to);
    if (is_pinned(from)) {
        copy(stream_of(stream), target, from, bytes);
    } else {
        // Pageable memory has been read when the call returns.
        auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
        stream_of(stream)->enqueue([=] {
            std::memcpy(target, staged->data(), staged->size());
            emulated_written(target, staged->size());
        });
    }
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void* to, std::uint64_t from, std::size_t bytes, Handle stream) {
    copy(stream_of(stream), to, reinterpret_cast<const void*>(from), bytes);
    // Pageable memory has been written when the call returns.
    if (!is_pinned(to)) stream_of(stream)->finish();
    return SUCCESS;
}

int cuMemcpyAsync(std::uint64_t to, std::uint64_t from, std::size_t bytes, Handle stream) {
    copy(stream_of(stream), reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, Handle stream) {
    return cuMemcpyAsync(to, from, bytes, stream);
}

int cuMemsetD8Async(std::uint64_t address, unsigned char value, std::size_t bytes, Handle stream) {
    stream_of(stream)->enqueue([=] {
        std::memset(reinterpret_cast<void*>(address), value, bytes);
        emulated_written(reinterpret_cast<void*>(address), bytes);
    });
    return SUCCESS;
}

// ---- streams, events, graphs ----

int cuStreamCreate(Handle* stream, unsigned) {
    auto* created = new Stream;
    std::lock_guard lock(streams_lock);
    streams.insert(created);
    *stream = created;
    return SUCCESS;
}

int cuStreamDestroy_v2(Handle handle) {
    Stream* stream = stream_of(handle);
    stream->finish();
    std::lock_guard lock(streams_lock);
    streams.erase(stream);
    return SUCCESS;
}

int cuStreamSynchronize(Handle stream) {
    stream_of(stream)->finish();
    return SUCCESS;
}

int cuEventCreate(Handle* event, unsigned) {
    *event = new Event;
    return SUCCESS;
}

int cuEventDestroy_v2(Handle event) {
    complete(*static_cast<Event*>(event));
    delete static_cast<Event*>(event);
    return SUCCESS;
}

int cuEventRecord(Handle handle, Handle stream) {
    auto* event = static_cast<Event*>(handle);
    Stream* on = stream_of(stream);
    // Destroying an event completes it, so it lives when the time is taken.
    on->enqueue([event] { event->time = std::chrono::steady_clock::now(); });
    event->stream = on;
    event->after = on->issued;
    return SUCCESS;
}

int cuEventSynchronize(Handle event) {
    complete(*static_cast<Event*>(event));
    return SUCCESS;
}

int cuEventQuery(Handle handle) {
    const Event& event = *static_cast<Event*>(handle);
    if (!event.stream || event.stream->executed >= event.after) return SUCCESS;
    // Who asks again and again sees progress.
    event.stream->reach(event.stream->executed + 1);
    return NOT_READY;
}

int cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
    const auto time = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    *milliseconds = std::chrono::duration<float, std::milli>(time).count();
    return SUCCESS;
}

int cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
    // A wait covers the record that is the latest now.
    const Event recorded = *static_cast<Event*>(event);
    stream_of(stream)->enqueue([recorded] { complete(recorded); });
    return SUCCESS;
}

int cuStreamBeginCapture_v2(Handle stream, int) {
    stream_of(stream)->recording = new std::vector<Work>;
    return SUCCESS;
}

int cuStreamEndCapture(Handle stream, Handle* graph) {
    *graph = std::exchange(stream_of(stream)->recording, nullptr);
    return *graph ? SUCCESS : INVALID_HANDLE;
}

int cuGraphInstantiateWithFlags(Handle* executable, Handle graph, std::uint64_t) {
    *executable = new std::vector<Work>(*static_cast<std::vector<Work>*>(graph));
    return SUCCESS;
}

int cuGraphLaunch(Handle executable, Handle stream) {
    for (const Work& work : *static_cast<std::vector<Work>*>(executable)) stream_of(stream)->enqueue(work);
    return SUCCESS;
}

int cuGraphDestroy(Handle graph) {
    delete static_cast<std::vector<Work>*>(graph);
    return SUCCESS;
}

int cuGraphExecDestroy(Handle executable) { return cuGraphDestroy(executable); }

// ---- other processes ----

struct IpcHandle {
    char bytes[64];
};

struct SharedMemory {
    int process, file;
    std::size_t bytes;
};

int cuIpcGetMemHandle(IpcHandle* handle, std::uint64_t address) {
    std::lock_guard lock(memory_lock);
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    // Other processes do not say what they write.
    emulated_written(reinterpret_cast<void*>(address), found->second.bytes);
    const SharedMemory shared = {getpid(), found->second.file, found->second.bytes};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &shared, sizeof shared);
    return SUCCESS;
}

int cuIpcOpenMemHandle_v2(std::uint64_t* address, IpcHandle handle, unsigned) {
    SharedMemory shared;
    std::memcpy(&shared, &handle, sizeof shared);
    const std::string path = "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* start = file < 0 ? nullptr : map_file(file, shared.bytes, nullptr);
    if (!start) {
        if (file >= 0) close(file);
        return INVALID_HANDLE;
    }
    std::lock_guard lock(memory_lock);
    *address = reinterpret_cast<std::uint64_t>(start);
    emulated_written(start, shared.bytes);
    allocations[*address] = {shared.bytes, file};
    used += shared.bytes;
    return SUCCESS;
}

int cuIpcCloseMemHandle(std::uint64_t address) { return cuMemFree_v2(address); }

// The other process executes an operation before it can tell anybody about it, so that its events are complete.
int cuIpcGetEventHandle(IpcHandle* handle, Handle) {
    std::memset(handle, 0, sizeof *handle);
    return late() ? INVALID_HANDLE : SUCCESS;
}
int cuIpcOpenEventHandle(Handle* event, IpcHandle) { return cuEventCreate(event, 0); }

// ---- kernels ----

int cuModuleLoadData(Handle* module, const void* image) {
    const std::size_t bytes = image_bytes(image);
    const int file = bytes ? memfd_create("kernels", MFD_CLOEXEC) : -1;
    if (file < 0) return INVALID_IMAGE;
    const bool whole = write(file, image, bytes) == static_cast<ssize_t>(bytes);
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    *module = whole ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    // The file stays open: another one with the same path would be taken for this one.
    if (!*module) std::fprintf(stderr, "emulated GPU: %s\n", dlerror());
    return *module ? SUCCESS : INVALID_IMAGE;
}

int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    const void* kernel = dlsym(module, (std::string(name) + "_emulated").c_str());
    if (!kernel) return NOT_FOUND;
    *function = new Function{name, static_cast<const Kernel*>(kernel)};
    return SUCCESS;
}

int cuFuncGetAttribute(int* value, int, Handle) {
    *value = 0;
    return SUCCESS;
}
int cuFuncSetAttribute(Handle, int, int) { return SUCCESS; }

int cuLaunchKernel(Handle handle, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                   unsigned threads_z, unsigned shared, Handle stream, void** parameters, void**) {
    const auto* function = static_cast<Function*>(handle);
    if (!x || !y || !z || !threads_x || y > 65535 || z > 65535 || threads_x * threads_y * threads_z > 1024 || shared > 227 << 10)
        return INVALID_VALUE;
    Arguments arguments(function->kernel->bytes);
    function->kernel->pack(parameters, arguments.data());
    stream_of(stream)->enqueue([=]() mutable {
        run_grid({function->name.c_str(), function->kernel, arguments.data(), {x, y, z}, {threads_x, threads_y, threads_z}, shared});
    });
    return SUCCESS;
}
}
