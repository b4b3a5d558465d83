//! Damaged inputs give an error or a result, but no panic and no endless loop.

use lockstep_comm::single_rank;
use lockstep_gbdt::data::{Format, Reader, read};
use lockstep_gbdt::{Matrix, Model, ModelFormat, Params, Schema, Team};

use crate::support::{Folder, mixed, train, uniform};

/// Changes, removes, repeats or inserts some bytes.
fn mutate(bytes: &[u8], case: usize) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let words = [
        &b","[..],
        b"\"",
        b"\n",
        b":",
        b"-",
        b"1e999",
        b"nan",
        b"[",
        b"}",
        b"null",
        b"9999999999",
        b"\xff",
    ];
    for change in 0..1 + case % 3 {
        let at = (uniform(case as u64, 3 * change) * out.len() as f32) as usize;
        let at = at.min(out.len().saturating_sub(1));
        let pick = (uniform(case as u64, 3 * change + 1) * 65_536.0) as usize;
        match pick % 4 {
            0 if !out.is_empty() => out[at] = (pick >> 4) as u8,
            1 => drop(out.drain(at..(at + pick % 17).min(out.len()))),
            2 => drop(out.splice(at..at, words[pick / 4 % words.len()].iter().copied())),
            _ => {
                let end = (at + pick % 40).min(out.len());
                let copy = out[at..end].to_vec();
                drop(out.splice(at..at, copy));
            }
        }
    }
    out
}

/// Reads changed copies of a file; some must be valid and some not.
pub fn read_mutations(name: &str, format: Format, bytes: &[u8], cases: usize) {
    let folder = Folder::new(&format!("mutations-{name}"));
    let (world, team) = (single_rank(), Team::new(1));
    let schema = Schema::default();
    let reader = Reader {
        schema: &schema,
        format: Some(format),
        labeled: true,
        team: &team,
        spill: None,
        categories: None,
    };
    let (mut good, mut bad) = (0, 0);
    for case in 0..cases {
        let path = folder.write("data", mutate(bytes, case));
        match read(&world, &path, &reader)
            .and_then(|table| Matrix::new(&world, &table, None, 16, &team))
        {
            Ok(_) => good += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                bad += 1;
            }
        }
    }
    assert!(good > cases / 20 && bad > cases / 20, "{name}: {good} good, {bad} bad");
}

#[test]
fn csv() {
    let mut text = String::from("label,\"a\"\"b\",c\n");
    (0..30).for_each(|row| text += &format!("{},{},\"{}\"\n", row % 2, row as f32 * 0.5, row * 3));
    read_mutations("csv", Format::Csv, text.as_bytes(), 4000);
}

#[test]
fn libsvm() {
    let line = |row: usize| format!("{} {}:{} {}:1e-3\n", row % 2, row % 4, row, row % 4 + 5);
    let text: String = (0..30).map(line).collect();
    read_mutations("libsvm", Format::Libsvm, text.as_bytes(), 3000);
}

#[test]
fn models() {
    let data = mixed(200);
    let model = train(&data, &Params { rounds: 2, max_depth: 3, ..Params::default() }, 1, 1);
    let row = data.row(0);
    for format in [ModelFormat::Json, ModelFormat::Ubj] {
        let bytes = model.to_bytes(format);
        for case in 0..3000 {
            // A model that is accepted can predict.
            if let Ok(model) = Model::from_bytes(&mutate(&bytes, case)) {
                assert_eq!(model.predict_row(row).len(), model.outputs);
            }
        }
    }
    assert!(Model::from_bytes(b"").is_err());
}
