//! Replicas with a slower rank or slower links.

use crate::case::Case;

/// Relative speed of the stages of one replica. The ranks of a stage wait for the slowest among them.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Speed {
    pub compute: Vec<f64>, // (ranks of the pipeline)
    pub link: Vec<f64>,
    /// The slowest link of all replicas, for communication between them.
    pub slowest_link: f64,
}

impl Speed {
    pub fn whole(pipe: usize) -> Speed {
        Speed { compute: vec![1.0; pipe], link: vec![1.0; pipe], slowest_link: 1.0 }
    }
}

/// The distinct speeds of all replicas that have a differing rank.
pub(super) fn speeds(case: &Case) -> Vec<Speed> {
    let mut replicas: Vec<(usize, Speed)> = Vec::new();
    let mut slowest: f64 = 1.0;
    for rank in case.cluster.differing(case.plan.ranks) {
        let (compute, link, _) = case.cluster.of_rank(rank);
        slowest = slowest.min(link);
        let coord = case.mesh.coord(rank);
        // Ranks of the context axis work on the same sequences and wait for each other.
        let at = match replicas.iter().position(|(data, _)| *data == coord.data) {
            Some(at) => at,
            None => {
                replicas.push((coord.data, Speed::whole(case.pipe())));
                replicas.len() - 1
            }
        };
        let speed = &mut replicas[at].1;
        speed.compute[coord.pipe] = speed.compute[coord.pipe].min(compute);
        speed.link[coord.pipe] = speed.link[coord.pipe].min(link);
    }
    let mut speeds: Vec<Speed> = Vec::new();
    for (_, speed) in replicas {
        let speed = Speed { slowest_link: slowest, ..speed };
        if !speeds.contains(&speed) {
            speeds.push(speed);
        }
    }
    speeds
}
