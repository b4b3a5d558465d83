//! Arbitrary bytes as the data of boosted trees: they are rejected, or can be binned. The first byte selects the format
//! and the roles of columns.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lockstep_comm::single_rank;
use lockstep_fuzz::{folder, timed};
use lockstep_gbdt::data::{Format, Reader, read};
use lockstep_gbdt::{Matrix, Schema, Team};

static PATH: LazyLock<PathBuf> = LazyLock::new(|| folder("trees-data").join("data"));

/// Wider tables are not binned: a feature takes time and memory of its own.
const MAX_FEATURES: usize = 1 << 12;

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    fs::write(&*PATH, bytes).expect("written");
    let formats = [Format::Csv, Format::Libsvm, Format::Npy];
    let named = |bit: u8, name: &str| (choice & bit != 0).then(|| name.to_string());
    let schema = Schema {
        weight: named(8, "f1"),
        group: named(16, "f2"),
        categorical: named(32, "f3").into_iter().collect(),
        header: (choice & 64 != 0).then_some(false),
        ..Schema::default()
    };
    let team = Team::new(1);
    let reader = Reader {
        schema: &schema,
        format: Some(formats[usize::from(choice & 7) % formats.len()]),
        labeled: choice & 128 == 0,
        team: &team,
        spill: None,
        categories: None,
    };
    timed(|| {
        let group = single_rank();
        let Ok(table) = read(&group, &PATH, &reader) else { return };
        assert!(table.label.is_empty() || table.label.len() == table.rows());
        if table.names.len() <= MAX_FEATURES {
            let _ = Matrix::new(&group, &table, None, 16, &team);
        }
    });
});
