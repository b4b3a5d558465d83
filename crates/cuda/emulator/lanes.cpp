// Runs the threads of a grid on one thread of the host, block by block. A CUDA thread is a coroutine with a stack of its
// own; it gives way where it waits for others. Threads run one after the other from barrier to barrier, in an order that
// LOCKSTEP_EMULATED_ORDER chooses: a kernel without races gives the same result in every order.

#include "check.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
constexpr int WARP = 32;
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

    bool ready() const { return !done && (!waits_for || waits_for->round != round); }
};

class Block {
  public:
    void run(const Launch& launch, Index at);
    void barrier(int id, int threads);
    const char* exchange(const void* operand, int bytes);

  private:
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<int> order;
    std::array<Meeting, BARRIERS> barriers;
    std::vector<char> shared;
    std::vector<char*> stacks;
    int created = 0;
    const Launch* launch = nullptr;
    Thread* current = nullptr;
    void* host = nullptr;
    int alive = 0;
    std::mt19937 random{1};

    void resume(Thread& thread);
    void* enter(Thread& thread);
    void wait(const Meeting& meeting);
    void finish();
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
        if (other.ready()) return emulated_switch(&self.stack, enter(other));
    }
    emulated_switch(&self.stack, host);
}

void Block::finish() {
    Thread& self = *current;
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
    int at_barriers = 0;
    for (const Thread& thread : threads)
        at_barriers += !thread.done && thread.waits_for && thread.waits_for != &thread.warp->meeting;
    const std::string message = std::string(launch->name) + ": " + std::to_string(alive) + " of " +
                                std::to_string(threads.size()) + " threads of a block wait forever, " +
                                std::to_string(at_barriers) + " of them at a barrier";
    emulated_fail(message.c_str());
}

void Block::run(const Launch& work, Index at) {
    launch = &work;
    const unsigned count = work.threads.x * work.threads.y * work.threads.z;
    threads.assign(count, Thread{});
    warps.resize((count + WARP - 1) / WARP);
    for (Warp& warp : warps) warp.meeting = Meeting{}, warp.alive = 0;
    barriers = {};
    // Bytes that were never written are not a number.
    shared.assign(work.shared_bytes + 64, static_cast<char>(0xff));
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(shared.data()) + 63) / 64 * 64);
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
            if (thread.ready()) {
                resume(thread);
                progress = true;
                i = thread.warp->first;
            } else {
                i++;
            }
        }
        if (!progress) stuck();
    }
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
void emulated_fail(const char* message) {
    std::fprintf(stderr, "emulated GPU: %s\n", message);
    std::abort();
}
}

} // namespace emulated
