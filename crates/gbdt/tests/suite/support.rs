//! Data and trainings for the tests.

use std::path::PathBuf;

use lockstep_comm::{LinkCosts, Options, World, on_threads_with, shard_range};
use lockstep_gbdt::{Booster, Matrix, Model, ModelFormat, Params, Table, Team};

/// A folder that is removed at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path =
            std::env::temp_dir().join(format!("lockstep-gbdt-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A number from 0 to 1 that is a function of its arguments.
pub fn uniform(seed: u64, index: usize) -> f32 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (index as u64).wrapping_mul(0xd134_2543_de82_ef95);
    for _ in 0..2 {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 31;
    }
    (x >> 40) as f32 / (1u64 << 24) as f32
}

/// Data of all ranks.
#[derive(Clone)]
pub struct Data {
    pub columns: usize,
    /// Row by row.
    pub values: Vec<f32>,
    pub label: Vec<f32>,
    pub weight: Option<Vec<f32>>,
    pub group: Option<Vec<u64>>,
    /// Categorical columns.
    pub categorical: Vec<usize>,
}

impl Data {
    pub fn rows(&self) -> usize {
        self.label.len()
    }

    /// The rows of one rank; groups are not divided.
    pub fn shard(&self, ranks: usize, rank: usize) -> Table {
        let mut range = shard_range(self.rows(), ranks, rank);
        if let Some(group) = &self.group {
            let snap = |mut row: usize| {
                while row > 0 && row < group.len() && group[row] == group[row - 1] {
                    row += 1;
                }
                row
            };
            range = snap(range.start)..snap(range.end);
        }
        self.part(range)
    }

    pub fn part(&self, range: std::ops::Range<usize>) -> Table {
        let values = self.values[range.start * self.columns..range.end * self.columns].to_vec();
        let names = Table::numbered(self.columns);
        let mut table = Table::dense(names, values, self.label[range.clone()].to_vec());
        table.weight = self.weight.as_ref().map(|weight| weight[range.clone()].to_vec());
        table.group = self.group.as_ref().map(|group| group[range].to_vec());
        self.categorical.iter().for_each(|column| table.categories[*column] = Some(Vec::new()));
        table
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }
}

/// Rows with dense, sparse, constant, categorical and discrete columns, and some missing values.
pub fn mixed(rows: usize) -> Data {
    let columns = 9;
    let mut values = Vec::new();
    let mut label = Vec::new();
    for row in 0..rows {
        let u = |k: usize| uniform(k as u64 + 1, row);
        let x = [
            u(0),
            u(1) * 10.0 - 5.0,
            if u(2) < 0.3 { f32::NAN } else { u(3) },
            if u(4) < 0.9 { f32::NAN } else { (u(5) * 20.0).floor() },
            (u(6) * 4.0).floor(),
            7.0,
            f32::NAN,
            (u(7) * 6.0).floor(),
            if u(8) < 0.97 { f32::NAN } else { u(9) },
        ];
        let missing = if x[2].is_nan() { 0.7 } else { x[2] };
        let category = if [1.0, 3.0, 4.0].contains(&x[7]) { 1.5 } else { 0.0 };
        label.push(2.0 * x[0] + x[1].sin() + missing + 0.3 * x[4] + category + 0.1 * u(10));
        values.extend(x);
    }
    Data { columns, values, label, weight: None, group: None, categorical: vec![7] }
}

/// Labels above their median become 1, the others 0.
pub fn binary(mut data: Data) -> Data {
    let mut sorted = data.label.clone();
    sorted.sort_by(f32::total_cmp);
    let middle = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
    data.label.iter_mut().for_each(|label| *label = f32::from(u8::from(*label > middle)));
    data
}

/// Options of worlds whose decisions do not depend on measurements.
pub fn options() -> Options {
    Options { link_costs: Some(LinkCosts::default()), ..Options::default() }
}

/// Trains on several ranks and returns the model, which must be the same on all of them.
pub fn train(data: &Data, params: &Params, ranks: usize, threads: usize) -> Model {
    let models =
        on_threads_with(&options(), ranks, |world| train_rank(&world, data, params, threads));
    let first = models[0].to_bytes(ModelFormat::Json);
    assert!(models.iter().all(|model| model.to_bytes(ModelFormat::Json) == first));
    models.into_iter().next().unwrap()
}

pub fn train_rank(world: &World, data: &Data, params: &Params, threads: usize) -> Model {
    let team = Team::new(threads);
    let table = data.shard(world.size(), world.rank());
    let matrix = Matrix::new(world, &table, None, params.max_bin, &team).unwrap();
    let mut booster = Booster::new(world, &team, &matrix, params).unwrap();
    (0..params.rounds).for_each(|_| booster.round().unwrap());
    booster.into_model()
}
