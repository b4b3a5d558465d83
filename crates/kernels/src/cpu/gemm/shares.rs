//! How fast each member of a team multiplies, and what it is given to do for that. Cores are not equal on a machine
//! that is shared: one whose other hyperthread works for somebody else has a quarter of its speed on tiles, for
//! milliseconds or for seconds. With equal shares all would wait for it.

use super::grid::{Grid, Rectangle};
use crate::Team;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a team remembers from one multiply to the next.
pub struct Shares(Mutex<Members>);

struct Members {
    paces: Vec<f64>,
    rectangles: Vec<Rectangle>,
    /// Nanoseconds that each took for its rectangle.
    took: Vec<AtomicU64>,
}

/// The slowest is given at least this part of what the fastest is, and so is seen to be fast again.
const SLOWEST: f64 = 0.1;
/// Where nobody worked longer, times say more about who woke up first.
const TELLING: Duration = Duration::from_micros(50);

impl Shares {
    pub(in crate::cpu) fn new(members: usize) -> Shares {
        Shares(Mutex::new(Members {
            paces: vec![1.0; members],
            rectangles: vec![Rectangle::default(); members],
            took: (0..members).map(|_| AtomicU64::new(0)).collect(),
        }))
    }

    /// Calls `work` on each member of the team with its rectangle of an (m, n) output, where that is not empty.
    pub fn run(
        &self,
        team: &Team,
        (m, n): (usize, usize),
        grain: (usize, usize),
        work: impl Fn(usize, &Rectangle) + Sync,
    ) {
        if team.size() == 1 {
            return work(0, &Rectangle { rows: 0..m, cols: 0..n });
        }
        // A panic leaves nothing here that would be wrong.
        let mut members = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        members.deal((m, n), grain);
        let Members { rectangles, took, .. } = &*members;
        team.run(&|member, _| {
            let rectangle = &rectangles[member];
            if !rectangle.is_empty() {
                let start = Instant::now();
                work(member, rectangle);
                let nanoseconds = start.elapsed().as_nanos() as u64;
                took[member].store(nanoseconds.max(1), Ordering::Relaxed);
            }
        });
        members.learn();
    }
}

impl Members {
    fn deal(&mut self, (m, n): (usize, usize), grain: (usize, usize)) {
        let grid = Grid::of(self.paces.len(), m, n, grain);
        for (member, rectangle) in self.rectangles.iter_mut().enumerate() {
            *rectangle = grid.share(member, &self.paces, (m, n), grain);
        }
    }

    /// Paces are those of this multiply, relative to the fastest. Who had nothing to do may be fast again by now, and
    /// is trusted with more until something is seen of it.
    fn learn(&mut self) {
        let Members { paces, rectangles, took } = self;
        let took = || took.iter().map(|took| Duration::from_nanos(took.load(Ordering::Relaxed)));
        let worked = || rectangles.iter().zip(took()).filter(|(share, _)| !share.is_empty());
        let pace = |share: &Rectangle, took: Duration| share.price() as f64 / took.as_secs_f64();
        if worked().all(|(_, took)| took < TELLING) {
            return;
        }
        let fastest = worked().map(|(share, took)| pace(share, took)).fold(0.0, f64::max);
        for ((known, share), took) in paces.iter_mut().zip(&*rectangles).zip(took()) {
            *known = match share.is_empty() {
                true => known.sqrt(),
                false => (pace(share, took) / fastest).max(SLOWEST),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{self, Data, DataMut, Gemm, Matrix};
    use crate::cpu::{Cpu, Level};

    #[test]
    fn bits_do_not_depend_on_who_was_given_how_much() {
        let (m, n, k) = (200, 330, 1100);
        let values = |len: usize| (0..len).map(|i| ((i * 7919) % 1013) as f32 / 77.0 - 6.0);
        let (a, b): (Vec<f32>, Vec<f32>) = (values(m * k).collect(), values(n * k).collect());
        let multiply = |cpu: &Cpu, scale| {
            let mut out = vec![0.0; m * n];
            let matrix = |data, transposed| Matrix { data: Data::F32(data), stride: k, transposed };
            gemm::run(
                cpu,
                Gemm {
                    m,
                    n,
                    k,
                    a: matrix(&a, false),
                    b: matrix(&b, true),
                    out: DataMut::F32(&mut out),
                    out_stride: n,
                    accumulate: false,
                    scale,
                    epilogue: Default::default(),
                },
            );
            out
        };
        for level in Level::of_this_machine().and_below() {
            let (alone, team) = (Cpu::at(level, 1), Cpu::at(level, 4));
            // Sums that wait in the output, and those that wait in scratch.
            for scale in [1.0, 0.5] {
                let expected = multiply(&alone, scale);
                for paces in [[1.0, 0.1, 0.5, 0.7], [0.1, 1.0, 0.1, 0.1], [0.3, 0.3, 1.0, 0.9]] {
                    team.shares.0.lock().unwrap().paces = paces.to_vec();
                    let same = multiply(&team, scale) == expected;
                    assert!(same, "{level:?}, {paces:?}, scaled by {scale}");
                }
            }
        }
    }

    /// A multiply of two members of whom the second is so many times slower: rows that each was given.
    fn multiply(members: &mut Members, rows: usize, slowness: u64) -> [usize; 2] {
        members.deal((rows, 64), (32, 32));
        for (member, rectangle) in members.rectangles.iter().enumerate() {
            let slowness = if member == 1 { slowness } else { 1 };
            members.took[member].store(rectangle.price() as u64 * 10 * slowness, Ordering::Relaxed);
        }
        members.learn();
        [0, 1].map(|member| members.rectangles[member].rows.len())
    }

    #[test]
    fn a_slow_member_is_given_less_until_it_is_fast() {
        let mut members = Shares::new(2).0.into_inner().unwrap();
        let mut multiply = |slowness| multiply(&mut members, 4096, slowness)[1];
        assert_eq!(multiply(4), 2048);
        let less = multiply(4);
        assert!((700..900).contains(&less), "a fifth of 4096: {less}");
        assert!(multiply(4).abs_diff(less) <= 32, "and it stays there");
        multiply(1);
        assert!(multiply(1).abs_diff(2048) <= 32, "and back");
        // However slow, it has something by which it can be measured.
        multiply(1000);
        assert!(multiply(1000) > 300);
    }

    #[test]
    fn who_is_left_with_nothing_is_asked_again() {
        let mut members = Shares::new(2).0.into_inner().unwrap();
        // Of four panels one that is ten times slower gets none.
        multiply(&mut members, 4096, 10);
        assert_eq!(multiply(&mut members, 128, 10), [128, 0]);
        let again = (0..4).find(|_| multiply(&mut members, 128, 1)[1] > 0);
        assert!(again.is_some(), "{:?}", members.paces);
        assert_eq!(multiply(&mut members, 128, 1), [64, 64]);
    }
}
