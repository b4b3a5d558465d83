// A lower bound for the time of an all_reduce: P threads of one process, P heap buffers. Thread r sums
// slice r of all buffers and writes the sum to all of them. There is no transport and no copy, only each
// rank's share of the memory traffic and two barriers.
//
//     bound RANKS BYTES,BYTES,..
//
// Warm-up, the number of iterations and the output are those of measure.py.

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef ELEM
#define ELEM float
#define DTYPE "f32"
#endif

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum { MOST_RANKS = 64, TILE = 1024, LONG_SPIN = 20000 };
static const double WARM_SECONDS = 0.05, TIMED_SECONDS = 0.3, LEAST_ITERATIONS = 5;

typedef struct {
    int ranks;
    int spins; // before a barrier yields
    const char *sizes;
    ELEM *buffers[MOST_RANKS];     // (ranks), each of `bytes`
    double seconds[MOST_RANKS];    // (ranks), of the last loop
    size_t wrong[MOST_RANKS];      // (ranks)
    _Alignas(64) atomic_int waiting;
    _Alignas(64) atomic_int turn;
} World;

typedef struct { World *world; int rank; } Rank;

// Spins for long if each thread has a core; otherwise yields to late threads.
static void barrier(World *w) {
    int turn = atomic_load_explicit(&w->turn, memory_order_relaxed);
    if (atomic_fetch_add(&w->waiting, 1) == w->ranks - 1) {
        atomic_store(&w->waiting, 0);
        atomic_store(&w->turn, turn + 1);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&w->turn, memory_order_acquire) == turn; spins++) {
        if (spins > w->spins) sched_yield();
        else PAUSE();
    }
}

static void sum_pair(ELEM *restrict a, ELEM *restrict b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ELEM sum = a[i] + b[i];
        a[i] = sum;
        b[i] = sum;
    }
}

// For more than two buffers: a tile of sums stays in the L1 cache between reading and writing.
static void sum_many(ELEM **buffers, int ranks, size_t first, size_t last) {
    ELEM tile[TILE];
    for (size_t at = first; at < last; at += TILE) {
        size_t n = last - at < TILE ? last - at : TILE;
        memcpy(tile, buffers[0] + at, n * sizeof(ELEM));
        for (int r = 1; r < ranks; r++) {
            const ELEM *from = buffers[r] + at;
            for (size_t i = 0; i < n; i++) tile[i] += from[i];
        }
        for (int r = 0; r < ranks; r++) memcpy(buffers[r] + at, tile, n * sizeof(ELEM));
    }
}

static void all_reduce(World *w, int rank, size_t count) {
    size_t first = count * rank / w->ranks, last = count * (rank + 1) / w->ranks;
    barrier(w);
    if (w->ranks == 2) sum_pair(w->buffers[0] + first, w->buffers[1] + first, last - first);
    else sum_many(w->buffers, w->ranks, first, last);
    barrier(w);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// The slowest rank's seconds for `iterations` calls, from a common start.
static double loop(World *w, int rank, size_t count, long iterations) {
    barrier(w);
    double start = now();
    for (long i = 0; i < iterations; i++) all_reduce(w, rank, count);
    w->seconds[rank] = now() - start;
    barrier(w);
    double slowest = 0;
    for (int r = 0; r < w->ranks; r++) slowest = fmax(slowest, w->seconds[r]);
    return slowest;
}

static double seconds_per_call(World *w, int rank, size_t count) {
    long batch = 1;
    double warm;
    while ((warm = loop(w, rank, count, batch)) < WARM_SECONDS) batch *= 2;
    long iterations = (long)fmax(LEAST_ITERATIONS, ceil(TIMED_SECONDS * batch / warm));
    return loop(w, rank, count, iterations) / iterations;
}

// One call on small integers, whose sums are exact. Leaves zeros in the buffers.
static void check(World *w, int rank, size_t count) {
    ELEM *mine = w->buffers[rank];
    for (size_t i = 0; i < count; i++) mine[i] = (ELEM)(i % 251 + rank);
    all_reduce(w, rank, count);
    w->wrong[rank] = 0;
    for (size_t i = 0; i < count; i++)
        w->wrong[rank] += mine[i] != (ELEM)(w->ranks * (i % 251) + w->ranks * (w->ranks - 1) / 2);
    memset(mine, 0, count * sizeof(ELEM));
}

static void print_record(World *w, size_t bytes, double seconds) {
    size_t wrong = 0;
    for (int r = 0; r < w->ranks; r++) wrong += w->wrong[r];
    double algbw = bytes / seconds / 1e9, bus = 2.0 * (w->ranks - 1) / w->ranks;
    printf("{\"op\": \"all_reduce\", \"engine\": \"bound\", \"algo\": \"threads summing in place\", "
           "\"ranks\": %d, \"dtype\": \"%s\", \"bytes\": %zu, \"time_us\": %.4f, \"algbw_gbs\": %.6f, "
           "\"busbw_gbs\": %.6f, \"wrong\": %zu, \"buffers\": \"ordinary\"}\n",
           w->ranks, DTYPE, bytes, seconds * 1e6, algbw, algbw * bus, wrong);
    fflush(stdout);
}

static void *run_rank(void *argument) {
    Rank *self = argument;
    World *w = self->world;
    for (const char *at = w->sizes; *at;) {
        char *end;
        size_t bytes = strtoull(at, &end, 10), count = bytes / sizeof(ELEM);
        at = *end == ',' ? end + 1 : end;
        w->buffers[self->rank] = malloc(bytes);
        if (!w->buffers[self->rank]) { perror("bound: malloc"); exit(1); }
        check(w, self->rank, count);
        double seconds = seconds_per_call(w, self->rank, count);
        if (self->rank == 0) print_record(w, bytes, seconds);
        barrier(w);
        free(w->buffers[self->rank]);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int ranks = argc == 3 ? atoi(argv[1]) : 0;
    if (ranks < 1 || ranks > MOST_RANKS) {
        fprintf(stderr, "usage: bound RANKS BYTES,BYTES,..  with 1 to %d ranks\n", MOST_RANKS);
        return 2;
    }
    static World world;
    world.ranks = ranks;
    world.spins = ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? LONG_SPIN : 0;
    world.sizes = argv[2];
    pthread_t threads[MOST_RANKS];
    Rank selves[MOST_RANKS];
    for (int r = 0; r < ranks; r++) {
        selves[r] = (Rank){&world, r};
        pthread_create(&threads[r], NULL, run_rank, &selves[r]);
    }
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    return 0;
}
