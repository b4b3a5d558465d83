//! Work partition of a multiply by the measured speed of each thread. Cores of a shared machine differ: one whose
//! other hyperthread is busy runs tile instructions at a quarter of its speed, for milliseconds or for seconds. With
//! equal parts all threads would wait for it.

use super::grid::{Grid, Rectangle};
use crate::Team;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Speeds of a team's threads, remembered from one multiply to the next.
pub struct LoadBalancer(Mutex<Threads>);

struct Threads {
    /// Relative to the fastest thread.
    speeds: Vec<f64>,
    rectangles: Vec<Rectangle>,
    /// Nanoseconds that each thread took for its rectangle.
    times: Vec<AtomicU64>,
}

/// Minimum speed of a thread relative to the fastest. A slow thread still gets enough work to be measured.
const MIN_SPEED: f64 = 0.1;
/// If no thread worked longer than this, the times mostly show which thread woke up first.
const MIN_MEASURED: Duration = Duration::from_micros(50);

impl LoadBalancer {
    pub(in crate::cpu) fn new(threads: usize) -> LoadBalancer {
        LoadBalancer(Mutex::new(Threads {
            speeds: vec![1.0; threads],
            rectangles: vec![Rectangle::default(); threads],
            times: (0..threads).map(|_| AtomicU64::new(0)).collect(),
        }))
    }

    /// Calls `work` on each thread with its rectangle of an (m, n) output, unless that is empty.
    pub fn run(
        &self,
        team: &Team,
        (m, n): (usize, usize),
        granularity: (usize, usize),
        work: impl Fn(usize, &Rectangle) + Sync,
    ) {
        if team.size() == 1 {
            return work(0, &Rectangle { rows: 0..m, cols: 0..n });
        }
        // A panic leaves no inconsistent state behind.
        let mut threads = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        threads.partition((m, n), granularity);
        let Threads { rectangles, times, .. } = &*threads;
        team.run(&|thread, _| {
            let rectangle = &rectangles[thread];
            if !rectangle.is_empty() {
                let start = Instant::now();
                work(thread, rectangle);
                let nanoseconds = start.elapsed().as_nanos() as u64;
                times[thread].store(nanoseconds.max(1), Ordering::Relaxed);
            }
        });
        threads.update_speeds();
    }

    #[cfg(test)]
    pub fn set_speeds(&self, speeds: &[f64]) {
        self.0.lock().unwrap().speeds = speeds.to_vec();
    }
}

impl Threads {
    fn partition(&mut self, (m, n): (usize, usize), granularity: (usize, usize)) {
        let grid = Grid::choose(self.speeds.len(), m, n, granularity);
        for (thread, rectangle) in self.rectangles.iter_mut().enumerate() {
            *rectangle = grid.rectangle(thread, &self.speeds, (m, n), granularity);
        }
    }

    /// Sets the speeds to those of this multiply. A thread that had no work may be fast again: its speed is raised
    /// until it is measured.
    fn update_speeds(&mut self) {
        let Threads { speeds, rectangles, times } = self;
        let times = || times.iter().map(|time| Duration::from_nanos(time.load(Ordering::Relaxed)));
        let worked = || rectangles.iter().zip(times()).filter(|(part, _)| !part.is_empty());
        let speed = |part: &Rectangle, time: Duration| part.cost() as f64 / time.as_secs_f64();
        if worked().all(|(_, time)| time < MIN_MEASURED) {
            return;
        }
        let fastest = worked().map(|(part, time)| speed(part, time)).fold(0.0, f64::max);
        for ((known, part), time) in speeds.iter_mut().zip(&*rectangles).zip(times()) {
            *known = match part.is_empty() {
                true => known.sqrt(),
                false => (speed(part, time) / fastest).max(MIN_SPEED),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a multiply by two threads, the second of which is `slowness` times slower, and returns the rows that
    /// each one had.
    fn multiply(threads: &mut Threads, rows: usize, slowness: u64) -> [usize; 2] {
        threads.partition((rows, 64), (32, 32));
        for (thread, rectangle) in threads.rectangles.iter().enumerate() {
            let slowness = if thread == 1 { slowness } else { 1 };
            threads.times[thread].store(rectangle.cost() as u64 * 10 * slowness, Ordering::Relaxed);
        }
        threads.update_speeds();
        [0, 1].map(|thread| threads.rectangles[thread].rows.len())
    }

    #[test]
    fn a_slow_thread_gets_less_until_it_is_fast_again() {
        let mut threads = LoadBalancer::new(2).0.into_inner().unwrap();
        let mut multiply = |slowness| multiply(&mut threads, 4096, slowness)[1];
        assert_eq!(multiply(4), 2048);
        let less = multiply(4);
        assert!((700..900).contains(&less), "expected a fifth of 4096, got {less}");
        assert!(multiply(4).abs_diff(less) <= 32, "the partition is stable");
        multiply(1);
        assert!(multiply(1).abs_diff(2048) <= 32, "the partition is equal again");
        // However slow, it gets enough work to be measured.
        multiply(1000);
        assert!(multiply(1000) > 300);
    }

    #[test]
    fn an_idle_thread_gets_work_again() {
        let mut threads = LoadBalancer::new(2).0.into_inner().unwrap();
        // A thread that is ten times slower gets none of four panels.
        multiply(&mut threads, 4096, 10);
        assert_eq!(multiply(&mut threads, 128, 10), [128, 0]);
        let again = (0..4).find(|_| multiply(&mut threads, 128, 1)[1] > 0);
        assert!(again.is_some(), "{:?}", threads.speeds);
        assert_eq!(multiply(&mut threads, 128, 1), [64, 64]);
    }
}
