// Runs the threads of a grid on one thread of the host, block by block. A CUDA thread is a coroutine with a stack of its
// own; it gives way where it waits for others. Threads run one after the other from barrier to barrier, in an order that
// LOCKSTEP_EMULATED_ORDER chooses: a kernel without races gives the same result in every order.

#include "check.h"
#include "hopper.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

#ifndef __x86_64__
#error "the emulated GPU switches stacks with x86-64 instructions"
#endif

namespace emulated {

constexpr std::size_t STACK = 256 << 10, STAGGER = 64 * 7 * 64;
constexpr int WARP = 32, WARPGROUP = 128;
constexpr int BARRIERS = 16;

// Saves the registers that a function must keep, and continues where another stack stopped.
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

// Where threads meet. `arrived` starts again when all have come, and `round` counts how often.
struct Meeting {
    int arrived = 0;
    unsigned warps = 0; // that have arrived
    std::uint64_t round = 0;

    // `ordered`: everybody may use what the others did before.
    void complete(bool ordered) {
        if (ordered && checking()) check_meeting(warps);
        arrived = 0;
        warps = 0;
        round++;
    }
};

// A barrier in shared memory that also counts the bytes of copies. Its meeting is complete with each phase.
struct Mbarrier {
    Meeting phases;
    unsigned arrivals = 0, missing = 0; // of a phase, and those that have not come
    long bytes = 0;                     // that were announced and have not come
    // Copies arrive when a thread waits for them, and no sooner.
    std::deque<Box> boxes;
    Order order;
};

// What an mbarrier has in shared memory.
constexpr std::uint64_t MBARRIER = 0x72656972726162ff;
constexpr long MOST_ARRIVALS = (1 << 20) - 1, MOST_BYTES = (1 << 20) - 1;

// Products that a thread has started. They take place when it waits for them, and no sooner.
struct Products {
    std::vector<Product> started;
    std::deque<std::size_t> groups; // their sizes
    std::size_t grouped = 0;        // products that are in a group
    std::size_t due = 0;            // that the thread waits for
    bool fenced = false;
};

struct Warp {
    Meeting meeting;
    bool orders = false; // whether it orders accesses to memory
    int alive = 0;
    int first = 0, end = 0; // its threads in the order in which they run
    // Operands of two rounds, so that a lane can bring the next while others still read.
    alignas(64) char operands[2][WARP][64];
};

struct Thread {
    Lane lane;
    Warp* warp;
    void* stack = nullptr; // where it stopped, or null before it starts
    char* memory = nullptr;
    bool done = false;
    int turn = 0; // its place in the order
    // Not runnable before this changes.
    const Meeting* waits_for = nullptr;
    std::uint64_t round = 0;
    Mbarrier* mbarrier = nullptr; // whose phase it waits for
    Products products;
};

class Block {
  public:
    void run(const Launch& launch, Index at);
    void barrier(int id, int threads);
    const char* exchange(const void* operand, int bytes);
    void init_mbarrier(void* address, unsigned arrivals);
    void arrive(void* address, unsigned bytes, const void* place);
    void wait_mbarrier(void* address, unsigned parity, const void* place);
    void load_box(void* to, const void* map, void* address, const int (&at)[3], const void* place);
    Products& products() { return current->products; }
    void start_product(const Product& product, const void* place);
    void wait_products(int newest);
    [[noreturn]] void fail(const std::string& message);

  private:
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<int> order;
    std::array<Meeting, BARRIERS> barriers;
    std::map<void*, Mbarrier> mbarriers;
    std::vector<Meeting> warpgroups;
    std::vector<char> shared;
    std::vector<char*> stacks;
    int created = 0;
    const Launch* launch = nullptr;
    Thread* current = nullptr;
    void* host = nullptr;
    int alive = 0;
    std::mt19937 random{1};

    bool ready(Thread& thread);
    void resume(Thread& thread);
    void* enter(Thread& thread);
    void wait(const Meeting& meeting);
    void finish();
    Mbarrier& find(void* address, const void* place);
    void deliver(Mbarrier& mbarrier);
    void complete(Mbarrier& mbarrier);
    void multiply(unsigned group);
    void arrange();
    [[noreturn]] void stuck();
    static void start();
    char* take_stack();
};

// The block that this thread of the host runs. Blocks that are done are used again, with their stacks.
static thread_local Block* block;
static std::mutex idle_lock;
static std::vector<Block*> idle;
thread_local Lane* emulated_current;

char* Block::take_stack() {
    if (!stacks.empty()) {
        char* memory = stacks.back();
        stacks.pop_back();
        return memory;
    }
    void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) emulated_fail("no memory for the stack of a thread");
    // An overflow is an access to a page that is protected.
    mprotect(memory, 4096, PROT_NONE);
    // Stacks that start at the same place of a page would compete for the same lines of the cache.
    return static_cast<char*>(memory) + created++ % 64 * 7 * 64;
}

// First function on a new stack.
void Block::start() {
    Block& self = *block;
    self.launch->kernel->run(self.launch->arguments);
    self.finish();
}

// Makes a thread the current one. Returns where its stack stopped, or a new stack.
void* Block::enter(Thread& thread) {
    current = &thread;
    emulated_current = &thread.lane;
    thread.waits_for = nullptr;
    thread.mbarrier = nullptr;
    if (!thread.stack) {
        thread.memory = take_stack();
        thread.lane.stack = thread.memory;
        thread.lane.stack_bytes = STACK - STAGGER;
        void** top = reinterpret_cast<void**>(thread.memory + STACK - STAGGER) - 2;
        *top = reinterpret_cast<void*>(&Block::start);
        // Six registers below the address to return to; the stack is aligned as after a call.
        thread.stack = top - 6;
    }
    return thread.stack;
}

// Whether a thread can run. One that waits for copies makes them arrive.
bool Block::ready(Thread& thread) {
    if (thread.done) return false;
    if (!thread.waits_for) return true;
    if (thread.mbarrier) deliver(*thread.mbarrier);
    return thread.waits_for->round != thread.round;
}

void Block::resume(Thread& thread) {
    void* stack = enter(thread);
    emulated_switch(&host, stack);
    if (current->done) stacks.push_back(current->memory);
}

// Continues with another thread of the warp if one can run, otherwise in `run`.
void Block::wait(const Meeting& meeting) {
    Thread& self = *current;
    self.waits_for = &meeting;
    self.round = meeting.round;
    const Warp& warp = *self.warp;
    for (int turn = self.turn + 1; turn != self.turn; turn++) {
        if (turn == warp.end) turn = warp.first;
        if (turn == self.turn) break;
        Thread& other = threads[order[turn]];
        if (ready(other)) return emulated_switch(&self.stack, enter(other));
    }
    emulated_switch(&self.stack, host);
}

void Block::finish() {
    Thread& self = *current;
    if (!self.products.started.empty()) fail("a thread ends with products that it did not wait for");
    self.done = true;
    self.warp->alive--;
    alive--;
    // Those that wait for the whole block do not wait for a thread that has returned.
    Meeting& whole = barriers[0];
    if (whole.arrived > 0 && whole.arrived == alive) whole.complete(true);
    Meeting& warp = self.warp->meeting;
    if (warp.arrived > 0 && warp.arrived == self.warp->alive) warp.complete(self.warp->orders);
    void* unused;
    emulated_switch(&unused, host);
}

void Block::barrier(int id, int count) {
    Meeting& meeting = barriers[id];
    meeting.warps |= 1u << current->lane.number / WARP;
    if (++meeting.arrived == (count ? count : alive)) {
        meeting.complete(true);
    } else {
        wait(meeting);
    }
}

const char* Block::exchange(const void* operand, int bytes) {
    Warp& warp = *current->warp;
    const std::uint64_t round = warp.meeting.round;
    char* to = warp.operands[round % 2][current->lane.thread.x % WARP];
    if (bytes == 4) std::memcpy(to, operand, 4);
    else std::memcpy(to, operand, bytes);
    warp.meeting.warps |= 1u << current->lane.number / WARP;
    // Without operands, this is `__syncwarp`.
    warp.orders = bytes == 0;
    if (++warp.meeting.arrived == warp.alive) {
        warp.meeting.complete(warp.orders);
    } else {
        wait(warp.meeting);
    }
    return warp.operands[round % 2][0];
}

// ---- mbarriers ----

void Block::init_mbarrier(void* address, unsigned arrivals) {
    if (reinterpret_cast<std::uintptr_t>(address) % 8) fail("an mbarrier is not at a multiple of 8");
    if (arrivals < 1 || arrivals > MOST_ARRIVALS) fail("an mbarrier is initialized for " + std::to_string(arrivals) + " arrivals");
    std::memcpy(address, &MBARRIER, sizeof MBARRIER);
    Mbarrier& mbarrier = mbarriers[address] = {};
    mbarrier.arrivals = mbarrier.missing = arrivals;
}

Mbarrier& Block::find(void* address, const void* place) {
    if (checking()) check_access(address, 8, ATOMIC, place);
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) fail("an mbarrier is used before it is initialized");
    if (std::memcmp(address, &MBARRIER, sizeof MBARRIER) != 0) fail("an mbarrier was overwritten");
    return found->second;
}

// Ends the phase if nothing is missing.
void Block::complete(Mbarrier& mbarrier) {
    if (mbarrier.missing > 0 || mbarrier.bytes != 0) return;
    mbarrier.missing = mbarrier.arrivals;
    mbarrier.phases.complete(false);
    if (checking()) check_phase(mbarrier.order);
}

void Block::deliver(Mbarrier& mbarrier) {
    const std::uint64_t phase = mbarrier.phases.round;
    while (!mbarrier.boxes.empty() && mbarrier.phases.round == phase) {
        const Box box = std::move(mbarrier.boxes.front());
        mbarrier.boxes.pop_front();
        write_box(box);
        if (checking()) check_box_arrives(mbarrier.order, box.clock, box.to, box.bytes.size());
        mbarrier.bytes -= static_cast<long>(box.bytes.size());
        if (mbarrier.bytes < 0 && (mbarrier.missing == 0 || mbarrier.bytes < -MOST_BYTES))
            fail("more bytes arrive at an mbarrier than it expects");
        complete(mbarrier);
    }
}

void Block::arrive(void* address, unsigned bytes, const void* place) {
    Mbarrier& mbarrier = find(address, place);
    if (checking()) check_arrival(mbarrier.order);
    mbarrier.bytes += bytes;
    if (mbarrier.bytes > MOST_BYTES) fail("an mbarrier expects " + std::to_string(mbarrier.bytes) + " bytes");
    // The last of a phase completes it, unless it waits for bytes.
    if (mbarrier.missing == 0) fail("more threads arrive at an mbarrier than it was initialized for");
    mbarrier.missing--;
    complete(mbarrier);
}

void Block::wait_mbarrier(void* address, unsigned parity, const void* place) {
    if (parity > 1) fail("an mbarrier has no phase of parity " + std::to_string(parity));
    Mbarrier& mbarrier = find(address, place);
    while (mbarrier.phases.round % 2 == parity) {
        deliver(mbarrier);
        if (mbarrier.phases.round % 2 != parity) break;
        current->mbarrier = &mbarrier;
        wait(mbarrier.phases);
    }
    if (checking()) check_wait(mbarrier.order);
}

void Block::load_box(void* to, const void* map, void* address, const int (&at)[3], const void* place) {
    Mbarrier& mbarrier = find(address, place);
    Box box = read_box(to, map, at, [&](const void* from, std::size_t bytes) {
        if (checking()) check_box_reads(from, bytes, place);
    });
    const char* from = current->lane.dynamic_shared;
    const std::size_t offset = static_cast<std::size_t>(box.to - from);
    if (offset < launch->shared_bytes && offset + box.bytes.size() > launch->shared_bytes)
        fail("load_box copies beyond the end of shared memory");
    if (checking()) box.clock = check_box_starts(to, box.bytes.size(), place);
    mbarrier.boxes.push_back(std::move(box));
}

// ---- products of warpgroups ----

void Block::start_product(const Product& product, const void* place) {
    Products& own = current->products;
    const Lane& lane = current->lane;
    if (!own.fenced) fail("a product comes before the first warpgroup_fence");
    if (lane.number % WARPGROUP == 0 && is_outside(product, launch->shared_bytes))
        fail("the matrices of a product are not in dynamic shared memory");
    own.started.push_back(product);
    if (checking() && lane.number % WARP == 0) own.started.back().clock = check_product_starts(product, lane.dynamic_shared, place);
}

// The last thread of the warpgroup multiplies for all.
void Block::wait_products(int newest) {
    Products& own = current->products;
    own.due = 0;
    for (; own.groups.size() > static_cast<std::size_t>(newest); own.groups.pop_front()) own.due += own.groups.front();
    if (own.due == 0) return;
    const unsigned group = current->lane.number / WARPGROUP;
    if ((group + 1) * WARPGROUP > threads.size()) fail("a product needs a warpgroup of 128 threads");
    Meeting& meeting = warpgroups[group];
    if (++meeting.arrived < WARPGROUP) return wait(meeting);
    multiply(group);
    meeting.complete(false);
}

void Block::multiply(unsigned group) {
    Thread* const members = &threads[group * WARPGROUP];
    const std::vector<Product>& first = members[0].products.started;
    const std::size_t due = members[0].products.due;
    const char* memory = members[0].lane.dynamic_shared;
    for (std::size_t i = 0; i < due; i++) {
        for (int t = 0; t < WARPGROUP; t++) {
            const Products& other = members[t].products;
            if (other.due != due || !other.started[i].same_operands(first[i]))
                fail("the threads of a warpgroup do not multiply the same matrices");
        }
    }
    // Products of the same sums at once.
    float* sums[WARPGROUP];
    for (std::size_t i = 0, end; i < due; i = end) {
        const auto same = [&](std::size_t other) {
            return std::all_of(members, members + WARPGROUP, [&](const Thread& member) {
                return member.products.started[i].sums == member.products.started[other].sums;
            });
        };
        for (end = i + 1; end < due && same(end);) end++;
        for (int t = 0; t < WARPGROUP; t++) sums[t] = members[t].products.started[i].sums;
        emulated::multiply(sums, &first[i], end - i, memory);
    }
    for (int t = 0; t < WARPGROUP; t++) {
        Products& own = members[t].products;
        if (checking() && t % WARP == 0) check_product_ends(members[t].lane.number / WARP, own.started[due - 1].clock);
        own.started.erase(own.started.begin(), own.started.begin() + static_cast<std::ptrdiff_t>(due));
        own.grouped -= due;
    }
}

// ---- blocks ----

// The order in which threads run. Warps stay together, because that is faster.
void Block::arrange() {
    static const std::string mode = [] {
        const char* value = std::getenv("LOCKSTEP_EMULATED_ORDER");
        return std::string(value ? value : "forward");
    }();
    order.resize(threads.size());
    for (std::size_t i = 0; i < order.size(); i++) order[i] = static_cast<int>(i);
    if (mode == "reverse") std::reverse(order.begin(), order.end());
    if (mode == "random") {
        const int count = static_cast<int>(warps.size());
        std::vector<int> by_warp(count);
        for (int i = 0; i < count; i++) by_warp[i] = i;
        std::shuffle(by_warp.begin(), by_warp.end(), random);
        order.clear();
        for (int warp : by_warp) {
            const std::size_t first = order.size();
            for (int i = warp * WARP; i < std::min<int>(threads.size(), (warp + 1) * WARP); i++) order.push_back(i);
            std::shuffle(order.begin() + first, order.end(), random);
        }
    }
}

void Block::stuck() {
    int at_barriers = 0, at_mbarriers = 0;
    for (const Thread& thread : threads) {
        if (thread.done || !thread.waits_for) continue;
        at_mbarriers += thread.mbarrier != nullptr;
        at_barriers += std::any_of(barriers.begin(), barriers.end(), [&](const Meeting& meeting) { return thread.waits_for == &meeting; });
    }
    std::string message = std::to_string(alive) + " of " + std::to_string(threads.size()) + " threads of a block wait forever, " +
                          std::to_string(at_barriers) + " of them at a barrier";
    if (at_mbarriers) message += ", " + std::to_string(at_mbarriers) + " at an mbarrier";
    fail(message);
}

void Block::fail(const std::string& message) { emulated_fail((std::string(launch->name) + ": " + message).c_str()); }

void Block::run(const Launch& work, Index at) {
    launch = &work;
    const unsigned count = work.threads.x * work.threads.y * work.threads.z;
    threads.assign(count, Thread{});
    warps.resize((count + WARP - 1) / WARP);
    for (Warp& warp : warps) warp.meeting = Meeting{}, warp.alive = 0;
    barriers = {};
    mbarriers.clear();
    warpgroups.assign(count / WARPGROUP, Meeting{});
    // Bytes that were never written are not a number. The swizzle of matrices depends on ten bits of the address.
    shared.assign(work.shared_bytes + 1024, static_cast<char>(0xff));
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(shared.data()) + 1023) / 1024 * 1024);
    for (unsigned i = 0; i < count; i++) {
        Thread& thread = threads[i];
        const Index index = {i % work.threads.x, i / work.threads.x % work.threads.y, i / work.threads.x / work.threads.y};
        thread.lane = {index, at, work.threads, work.blocks, aligned, nullptr, i, false, nullptr, 0};
        thread.warp = &warps[i / WARP];
        thread.warp->alive++;
    }
    if (checking()) check_block((at.z * work.blocks.y + at.y) * work.blocks.x + at.x, aligned, work.shared_bytes);
    alive = static_cast<int>(count);
    arrange();
    for (int turn = 0; turn < alive; turn++) {
        Thread& thread = threads[order[turn]];
        Warp& warp = *thread.warp;
        if (turn == 0 || threads[order[turn - 1]].warp != &warp) warp.first = turn;
        warp.end = turn + 1;
        thread.turn = turn;
    }
    while (alive > 0) {
        bool progress = false;
        // A warp runs as long as it can.
        for (std::size_t i = 0; i < order.size();) {
            Thread& thread = threads[order[i]];
            if (ready(thread)) {
                resume(thread);
                progress = true;
                i = thread.warp->first;
            } else {
                i++;
            }
        }
        if (!progress) stuck();
    }
    for (const auto& [address, mbarrier] : mbarriers)
        if (!mbarrier.boxes.empty()) fail("a block ends with copies that no thread waited for");
}

void run_grid(const Launch& launch) {
    {
        std::lock_guard lock(idle_lock);
        if (idle.empty()) idle.push_back(new Block);
        block = idle.back();
        idle.pop_back();
    }
    if (checking()) check_launch(launch);
    for (unsigned z = 0; z < launch.blocks.z; z++)
        for (unsigned y = 0; y < launch.blocks.y; y++)
            for (unsigned x = 0; x < launch.blocks.x; x++) block->run(launch, {x, y, z});
    emulated_current = nullptr;
    std::lock_guard lock(idle_lock);
    idle.push_back(block);
}

extern "C" {
void emulated_barrier(int id, int threads) { block->barrier(id, threads); }
const char* emulated_exchange(const void* operand, int bytes) { return block->exchange(operand, bytes); }

void emulated_init_mbarrier(void* barrier, unsigned arrivals) {
    if (checking()) check_access(barrier, 8, WRITE, __builtin_return_address(0));
    block->init_mbarrier(barrier, arrivals);
}
void emulated_arrive(void* barrier, unsigned bytes) { block->arrive(barrier, bytes, __builtin_return_address(0)); }
void emulated_wait_mbarrier(void* barrier, unsigned parity) {
    block->wait_mbarrier(barrier, parity, __builtin_return_address(0));
}
void emulated_load_box(void* shared, const void* map, void* barrier, int x, int y, int z) {
    block->load_box(shared, map, barrier, {x, y, z}, __builtin_return_address(0));
}
void emulated_warpgroup_fence() { block->products().fenced = true; }
void emulated_multiply_add(float* sums, unsigned long long a, unsigned long long b, bool a_transposed, bool b_transposed) {
    block->start_product({sums, a, b, a_transposed, b_transposed, 0}, __builtin_return_address(0));
}
void emulated_commit_products() {
    Products& own = block->products();
    own.groups.push_back(own.started.size() - own.grouped);
    own.grouped = own.started.size();
}
void emulated_wait_products(int newest) { block->wait_products(newest); }

void emulated_fail(const char* message) {
    std::fprintf(stderr, "emulated GPU: %s\n", message);
    std::abort();
}
}

void fail_launch(const std::string& message) { block->fail(message); }

} // namespace emulated
