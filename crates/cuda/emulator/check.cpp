// Watches the memory accesses of kernels. With LOCKSTEP_EMULATED_CHECK, kernels are compiled with the hooks of
// ThreadSanitizer, and this is what the hooks call. It reports
// - races: two threads of a launch access the same bytes, one of them writes, and no barrier is between the accesses.
//   `__syncwarp` orders the lanes of a warp; a shuffle does not. Blocks are ordered by atomic operations on the same word, the
//   first of which follows a `__threadfence`. Atomic operations do not race with each other;
// - bytes of shared or device memory that are read before anybody wrote them.
// An access is compared with the last few of the same word, whatever the order in which the emulation runs the threads.

#include "check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <link.h>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace emulated {

typedef std::uint64_t Address;

constexpr unsigned WARP = 32;
constexpr Address PAGE = 4096;
constexpr std::size_t MOST_PAGES = 4 << 10;

static const char* mode() {
    static const char* mode = std::getenv("LOCKSTEP_EMULATED_CHECK");
    return mode;
}

bool checking() { return mode() != nullptr; }

struct Access {
    std::uint32_t launch, block;
    std::uint32_t clock; // of the agent
    std::uint32_t place; // in the kernel's code
    std::uint16_t thread; // those of agents that are not warps follow after the last warp
    std::uint8_t bytes; // of the word, a bit each
    Kind kind;
};

// The last accesses to four bytes.
struct Word {
    Access accesses[4];
};

struct Page {
    Word words[PAGE / 4];
    // Which bytes of shared memory the block has written.
    std::uint32_t launch, block;
    std::uint8_t written[PAGE / 4];
};

// What a thread had done, and knew that others had done, when it released it with an atomic operation.
struct Release {
    std::uint32_t block, clock;
    std::uint16_t thread;
    std::uint32_t known[AGENTS];

    bool covers(const Access& earlier) const {
        return earlier.thread == thread ? earlier.clock <= clock : earlier.clock <= known[earlier.thread / WARP];
    }
};

// Who accesses memory: what it is compared as and recorded as.
struct Agent {
    std::uint16_t thread; // that is recorded
    std::uint32_t clock;  // that is recorded
    unsigned knows;       // whose knowledge of others counts
    unsigned own;         // the thread whose accesses are in order with these
};

struct Range {
    Address from = 0, to = 0;
    bool contains(Address address) const { return address - from < to - from; }
};

// What a thread of the host knows about the launch that it runs.
struct Observer {
    const char* kernel = nullptr;
    std::uint32_t launch = 0, block = 0;
    Range dynamic_shared, fixed_shared, code, arguments;
    // Parts of the device's memory that the launch has used.
    std::array<Range, 4> device;
    unsigned next_device = 0;
    // Fixed shared memory has no place before its first use.
    bool fixed_is_missing = false;
    const void* module = nullptr;
    // Meetings of each warp, and up to which of them a warp knows what another did.
    std::uint32_t clock[AGENTS], known[WARPS][AGENTS];
    // Releases of this launch, by the word, and those that the block knows, by the block.
    std::unordered_map<Address, std::vector<Release>> released;
    std::unordered_map<std::uint32_t, Release> acquired;
    std::unordered_map<Address, std::unique_ptr<Page>> pages, shared_pages;
    Address last_number = ~Address(0);
    Page* last = nullptr;
    unsigned next = 0;

    Page& page(Address address, bool shared);
    enum class Space { NONE, SHARED, DEVICE };
    Space space(Address address);
    Page& shared_page(Address address);
    bool before(const Access& earlier, unsigned warp) const;
    void synchronize(Address word);
    void access(Address address, unsigned bytes, Kind kind, const void* place, bool unwritten = false);
    void access_shared(const Agent& agent, Address address, std::uint8_t mask, Kind kind, std::uint32_t place);
    void word(const Agent& agent, Page& page, Address address, std::uint8_t bytes, Kind kind, std::uint32_t place, bool shared);
    std::uint32_t place(const void* from) const { return static_cast<std::uint32_t>(reinterpret_cast<Address>(from) - code.from); }
};

static thread_local Observer* observer;

struct Owner {
    std::unique_ptr<Observer> observer = std::make_unique<Observer>();
    ~Owner() { emulated::observer = nullptr; }
};

static Observer& own() {
    if (!observer) {
        static thread_local Owner owner;
        observer = owner.observer.get();
    }
    return *observer;
}

// ---- bytes of the device that were written ----

// A bit for each byte of the address space; only what is used takes memory.
static std::atomic<std::uint8_t>* written_bits() {
    static auto* bits = [] {
        void* start = mmap(nullptr, std::size_t(1) << 44, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) emulated_fail("no address space for LOCKSTEP_EMULATED_CHECK");
        return static_cast<std::atomic<std::uint8_t>*>(start);
    }();
    return bits;
}

static std::uint8_t bits_of(Address unit, Address from, Address to) {
    const Address first = std::max(from, 8 * unit) - 8 * unit, end = std::min(to, 8 * unit + 8) - 8 * unit;
    return static_cast<std::uint8_t>((1u << end) - (1u << first));
}

static void find_parts(Observer& observer);

static void set_written(Address from, std::size_t bytes, bool written) {
    auto* bits = written_bits();
    const Address to = from + bytes;
    for (Address unit = from / 8; 8 * unit < to; unit++) {
        const std::uint8_t mask = bits_of(unit, from, to), old = bits[unit].load(std::memory_order_relaxed);
        if (written && (old & mask) != mask) bits[unit] |= mask;
        if (!written && (old & mask) != 0) bits[unit] &= static_cast<std::uint8_t>(~mask);
    }
}

static bool is_written(Address from, std::size_t bytes) {
    const Address to = from + bytes;
    for (Address unit = from / 8; 8 * unit < to; unit++) {
        const std::uint8_t mask = bits_of(unit, from, to);
        if ((written_bits()[unit].load(std::memory_order_relaxed) & mask) != mask) return false;
    }
    return true;
}

void check_new(Address address, std::size_t bytes) {
    if (checking()) set_written(address, bytes, false);
}

extern "C" void emulated_written(const void* address, std::size_t bytes) {
    if (checking()) set_written(reinterpret_cast<Address>(address), bytes, true);
}

// ---- reports ----

// The line of a kernel's code, if its source is still there.
static std::string source_line(std::uint32_t place) {
    Dl_info info;
    const Address address = own().code.from + place;
    if (!dladdr(reinterpret_cast<void*>(address), &info)) return "?";
    // A file that this process has open has another name in others.
    std::string file = info.dli_fname;
    const std::string own_files = "/proc/self/";
    if (file.rfind(own_files, 0) == 0) file.replace(0, own_files.size(), "/proc/" + std::to_string(getpid()) + "/");
    char command[256];
    // The address is that of the next instruction. Functions of `device.h` are inlined: their caller is the place.
    std::snprintf(command, sizeof command, "addr2line -i -e %s 0x%llx", file.c_str(),
                  static_cast<unsigned long long>(address - reinterpret_cast<Address>(info.dli_fbase) - 1));
    FILE* pipe = popen(command, "r");
    std::string at;
    char found[512];
    while (pipe && std::fgets(found, sizeof found, pipe))
        if (at.empty() || at.find("/device.h:") != std::string::npos) at = found;
    if (pipe) pclose(pipe);
    const std::size_t colon = at.rfind(':');
    if (colon == std::string::npos) return "?";
    std::ifstream source(at.substr(0, colon));
    std::string line;
    for (int n = std::atoi(at.c_str() + colon + 1); n > 0 && std::getline(source, line); n--) {}
    line.erase(0, std::min(line.size(), line.find_first_not_of(' ')));
    return line.empty() ? at.substr(0, at.find('\n')) : line;
}

static const char* verb(Kind kind) {
    return kind == READ ? "reads" : kind == WRITE ? "writes" : "updates";
}

static void report(const std::string& what, std::uint32_t place, const Access* earlier) {
    static std::mutex lock;
    static std::set<std::tuple<std::string, std::uint32_t, std::uint32_t>> known;
    std::lock_guard guard(lock);
    if (!known.insert({own().kernel, place, earlier ? earlier->place : 0}).second) return;
    std::fprintf(stderr, "emulated GPU: %s: %s\n    %s\n", own().kernel, what.c_str(), source_line(place).c_str());
    if (earlier) std::fprintf(stderr, "    %s\n", source_line(earlier->place).c_str());
    if (std::strcmp(mode(), "report") != 0) emulated_fail("a kernel accesses memory wrongly; LOCKSTEP_EMULATED_CHECK=report continues");
}

// ---- accesses ----

Page& Observer::page(Address address, bool shared) {
    const Address number = address / PAGE;
    if (number == last_number) return *last;
    // Of too much memory, the past is forgotten.
    if (pages.size() > MOST_PAGES) pages.clear();
    auto& found = (shared ? shared_pages : pages)[number];
    if (!found) found = std::make_unique<Page>();
    last_number = number;
    last = found.get();
    return *last;
}

bool Observer::before(const Access& earlier, unsigned warp) const {
    if (earlier.block != block) {
        auto found = acquired.find(earlier.block);
        return found != acquired.end() && found->second.covers(earlier);
    }
    const unsigned other = earlier.thread / WARP; // a warp, or another agent
    return other == warp ? earlier.clock < clock[warp] : earlier.clock <= known[warp][other];
}

// An atomic operation: the block knows what was released here, and releases what its thread knows.
void Observer::synchronize(Address word) {
    auto& releases = released[word];
    for (const Release& release : releases)
        if (release.block != block) acquired.insert_or_assign(release.block, release);
    const Lane& lane = *emulated_current;
    if (!lane.fenced) return;
    const unsigned warp = lane.number / WARP;
    Release release = {block, clock[warp], static_cast<std::uint16_t>(lane.number), {}};
    std::memcpy(release.known, known[warp], sizeof release.known);
    releases.push_back(release);
}

static std::string name(unsigned thread) {
    if (thread < COPIES * WARP) return "thread " + std::to_string(thread);
    return thread < PRODUCTS * WARP ? "a copy of a box" : "a product";
}

void Observer::word(const Agent& agent, Page& page, Address address, std::uint8_t bytes, Kind kind, std::uint32_t place, bool shared) {
    Word& word = page.words[address % PAGE / 4];
    Access* target = nullptr;
    int rank = 0; // how good the target is
    for (Access& earlier : word.accesses) {
        // Shared memory belongs to one block at a time.
        const bool empty = earlier.launch != launch || (shared && earlier.block != block);
        int suits = 1;
        if (empty) {
            suits = 3;
        } else {
            const bool covered = (earlier.bytes & ~bytes) == 0 && (kind != READ || earlier.kind == READ);
            const bool same = earlier.block == block && earlier.thread == agent.own;
            const bool conflict = (earlier.bytes & bytes) && (kind != READ || earlier.kind != READ) &&
                                  !(kind == ATOMIC && earlier.kind == ATOMIC);
            if (!same && !before(earlier, agent.knows)) {
                if (conflict) {
                    const std::string other = name(earlier.thread) +
                                              (earlier.block == block ? "" : " of block " + std::to_string(earlier.block));
                    report("a race: " + name(agent.thread) + " of block " + std::to_string(block) + " " + verb(kind) +
                               (shared ? " shared" : " device") + " memory that " + other + " " + verb(earlier.kind),
                           place, &earlier);
                }
            } else if (covered) {
                suits = same ? 5 : 4;
            }
            if (suits == 1 && earlier.kind == READ) suits = 2;
        }
        if (suits > rank) rank = suits, target = &earlier;
    }
    // All are needed: forget one, a read if there is one.
    if (rank <= 2) {
        for (int i = 0; i < 4; i++) {
            Access& other = word.accesses[next++ % 4];
            if (rank == 1 || other.kind == READ) {
                target = &other;
                break;
            }
        }
    }
    *target = {launch, block, agent.clock, place, agent.thread, bytes, kind};
}

Observer::Space Observer::space(Address address) {
    if (dynamic_shared.contains(address) || fixed_shared.contains(address)) return Space::SHARED;
    for (const Range& range : device)
        if (range.contains(address)) return Space::DEVICE;
    if (arguments.contains(address) || code.contains(address)) return Space::NONE;
    if (fixed_is_missing) {
        find_parts(*this);
        if (fixed_shared.contains(address)) return Space::SHARED;
    }
    Range found;
    // Otherwise it is the emulation's own data.
    if (!find_device_memory(address, found.from, found.to)) return Space::NONE;
    device[next_device++ % device.size()] = found;
    return Space::DEVICE;
}

// A page of shared memory, of which a new block has written nothing.
Page& Observer::shared_page(Address address) {
    Page& here = page(address, true);
    if (here.launch != launch || here.block != block) {
        std::memset(here.written, 0, sizeof here.written);
        here.launch = launch, here.block = block;
    }
    return here;
}

void Observer::access_shared(const Agent& agent, Address address, std::uint8_t mask, Kind kind, std::uint32_t place) {
    Page& here = shared_page(address);
    std::uint8_t& known_bytes = here.written[address % PAGE / 4];
    if (kind != WRITE && (known_bytes & mask) != mask)
        report(name(agent.thread) + " of block " + std::to_string(block) + " reads shared memory that its block never wrote", place,
               nullptr);
    if (kind != READ) known_bytes |= mask;
    word(agent, here, address, mask, kind, place, true);
}

// `unwritten`: the device's memory may be memory that was never written.
void Observer::access(Address address, unsigned bytes, Kind kind, const void* from, bool unwritten) {
    const Lane& lane = *emulated_current;
    // What the thread has for itself.
    if (address - reinterpret_cast<Address>(lane.stack) < lane.stack_bytes) return;
    if (address - reinterpret_cast<Address>(&lane) < sizeof lane || address == reinterpret_cast<Address>(&emulated_current)) return;
    const Space memory = space(address);
    if (memory == Space::NONE) return;
    const bool shared = memory == Space::SHARED;
    const std::uint32_t place = this->place(from);
    const unsigned warp = lane.number / WARP;
    const Agent agent = {static_cast<std::uint16_t>(lane.number), clock[warp], warp, lane.number};
    if (!shared) {
        if (kind != WRITE && !unwritten && !is_written(address, bytes))
            report("thread " + std::to_string(lane.number) + " of block " + std::to_string(block) +
                       " reads device memory that was never written", place, nullptr);
        if (kind != READ) set_written(address, bytes, true);
    }
    if (kind == ATOMIC && !shared) synchronize(address / 4);
    const Address to = address + bytes;
    for (Address at = address / 4 * 4; at < to; at += 4) {
        const Address first = std::max(at, address) - at, end = std::min(at + 4, to) - at;
        const auto mask = static_cast<std::uint8_t>((1u << end) - (1u << first));
        if (shared) access_shared(agent, at, mask, kind, place);
        else word(agent, page(at, false), at, mask, kind, place, false);
    }
}

// ---- the order of accesses ----

struct Module {
    Address inside;
    Range fixed_shared, code;
    bool fixed_is_missing;
};

// Fixed shared memory is in variables that each thread of the host has.
static int find_module(dl_phdr_info* info, std::size_t, void* data) {
    auto& module = *static_cast<Module*>(data);
    Range code, variables;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        const Address start = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD) {
            if (!code.to) code.from = info->dlpi_addr;
            code.to = std::max(code.to, start + part.p_memsz);
        }
        if (part.p_type == PT_TLS) {
            variables.from = reinterpret_cast<Address>(info->dlpi_tls_data);
            variables.to = variables.from + part.p_memsz;
        }
    }
    if (!code.contains(module.inside)) return 0;
    module.code = code;
    module.fixed_is_missing = variables.to && !variables.from;
    if (variables.from) module.fixed_shared = variables;
    return 1;
}

static void find_parts(Observer& observer) {
    Module module = {reinterpret_cast<Address>(observer.module), {}, {}, false};
    dl_iterate_phdr(find_module, &module);
    observer.fixed_is_missing = module.fixed_is_missing;
    observer.code = module.code;
    observer.fixed_shared = module.fixed_shared;
}

void check_launch(const Launch& launch) {
    static std::atomic<std::uint32_t> launches = 0;
    Observer& self = own();
    self.kernel = launch.name;
    self.launch = ++launches;
    self.device = {};
    const auto arguments = reinterpret_cast<Address>(launch.arguments);
    self.arguments = {arguments, arguments + launch.kernel->bytes};
    self.released.clear();
    self.module = launch.kernel;
    find_parts(self);
}

void check_block(unsigned number, const char* shared, std::size_t bytes) {
    Observer& self = own();
    self.block = number;
    self.acquired.clear();
    self.dynamic_shared = {reinterpret_cast<Address>(shared), reinterpret_cast<Address>(shared) + bytes};
    // No warp has met another. Clocks start at 1: 0 is known from the beginning.
    std::fill_n(self.clock, AGENTS, 1u);
    std::memset(self.known, 0, sizeof self.known);
}

// `to` knows all that `from` knows.
static void learn(std::uint32_t* to, const std::uint32_t* from) {
    for (unsigned v = 0; v < AGENTS; v++) to[v] = std::max(to[v], from[v]);
}

void check_meeting(unsigned warps) {
    Observer& self = own();
    std::uint32_t all[AGENTS] = {};
    for (unsigned w = 0; w < WARPS; w++)
        if (warps >> w & 1) learn(all, self.known[w]);
    for (unsigned w = 0; w < WARPS; w++)
        if (warps >> w & 1) all[w] = self.clock[w]++;
    for (unsigned w = 0; w < WARPS; w++)
        if (warps >> w & 1) std::memcpy(self.known[w], all, sizeof all);
}

// The order of a warp and the mbarrier is that of its lanes: this finds no races within the warp.
void check_arrival(Order& order) {
    Observer& self = own();
    const unsigned warp = emulated_current->number / WARP;
    learn(order.arriving, self.known[warp]);
    order.arriving[warp] = self.clock[warp]++;
}

void check_phase(Order& order) { std::memcpy(order.complete, order.arriving, sizeof order.complete); }

void check_wait(const Order& order) { learn(own().known[emulated_current->number / WARP], order.complete); }

// ---- copies and products ----

void check_box_reads(const void* from, std::size_t bytes, const void* place) {
    own().access(reinterpret_cast<Address>(from), static_cast<unsigned>(bytes), READ, place, true);
}

std::uint32_t check_box_starts(const void* to, std::size_t bytes, const void* place) {
    Observer& self = own();
    const unsigned thread = emulated_current->number;
    const Agent agent = {COPIES * WARP, ++self.clock[COPIES], thread / WARP, thread};
    for (Address at = reinterpret_cast<Address>(to), end = at + bytes; at < end; at += 4) {
        self.access_shared(agent, at, 0xf, WRITE, self.place(place));
        // Not before it arrives.
        self.shared_page(at).written[at % PAGE / 4] = 0;
    }
    return agent.clock;
}

void check_box_arrives(Order& order, std::uint32_t clock, const void* to, std::size_t bytes) {
    for (Address at = reinterpret_cast<Address>(to), end = at + bytes; at < end; at += 4)
        own().shared_page(at).written[at % PAGE / 4] = 0xf;
    order.arriving[COPIES] = std::max(order.arriving[COPIES], clock);
}

std::uint32_t check_product_starts(const Product& product, const char* shared, const void* from) {
    Observer& self = own();
    const unsigned thread = emulated_current->number, warp = thread / WARP, number = PRODUCTS + warp;
    const std::uint32_t place = self.place(from);
    const Agent agent = {static_cast<std::uint16_t>(number * WARP), ++self.clock[number], warp, thread};
    visit_operands(product, shared, static_cast<int>(warp % 4), [&](const char* at) {
        for (unsigned i = 0; i < 16; i += 4) self.access_shared(agent, reinterpret_cast<Address>(at) + i, 0xf, READ, place);
    });
    return agent.clock;
}

void check_product_ends(unsigned warp, std::uint32_t clock) {
    const unsigned first = warp / 4 * 4;
    for (unsigned w = first; w < first + 4; w++) own().known[w][PRODUCTS + warp] = clock;
}

// ---- what instrumented kernels call ----

static void accessed(const void* address, unsigned bytes, Kind kind, const void* place) {
    if (emulated_current) own().access(reinterpret_cast<Address>(address), bytes, kind, place);
}

void check_access(const void* address, unsigned bytes, Kind kind, const void* place) { accessed(address, bytes, kind, place); }

extern "C" {
void emulated_read(const void* address, int bytes) { accessed(address, bytes, READ, __builtin_return_address(0)); }
void emulated_atomic(const void* address, int bytes) { accessed(address, bytes, ATOMIC, __builtin_return_address(0)); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HOOKS(BYTES)                                                                                                   \
    void __tsan_read##BYTES(void* at) { accessed(at, BYTES, READ, __builtin_return_address(0)); }                      \
    void __tsan_write##BYTES(void* at) { accessed(at, BYTES, WRITE, __builtin_return_address(0)); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#define UNALIGNED_HOOKS(BYTES)                                                                                         \
    void __tsan_unaligned_read##BYTES(void* at) { accessed(at, BYTES, READ, __builtin_return_address(0)); }            \
    void __tsan_unaligned_write##BYTES(void* at) { accessed(at, BYTES, WRITE, __builtin_return_address(0)); }
UNALIGNED_HOOKS(2)
UNALIGNED_HOOKS(4)
UNALIGNED_HOOKS(8)
UNALIGNED_HOOKS(16)
void __tsan_read_range(void* at, std::size_t bytes) { accessed(at, static_cast<unsigned>(bytes), READ, __builtin_return_address(0)); }
void __tsan_write_range(void* at, std::size_t bytes) { accessed(at, static_cast<unsigned>(bytes), WRITE, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_atomic_thread_fence(int) { emulated_current->fenced = true; }
}

} // namespace emulated
