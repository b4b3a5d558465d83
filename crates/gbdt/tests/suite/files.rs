//! Reading files on several ranks, the cache of binned data, and models as files.

use std::fmt::Write as _;
use std::path::Path;

use lockstep_comm::{on_threads_with, single_rank};
use lockstep_gbdt::data::{Reader, SpillTo, Store, Values, read};
use lockstep_gbdt::{
    Cache, Matrix, Model, ModelFormat, Params, Result, Schema, Table, Team, train,
};

use crate::support::{Folder, binary, mixed, options};

/// Rows of a table: label, weight, group and values, bit by bit.
pub fn rows(table: &Table) -> Vec<(u32, u32, u64, Vec<u32>)> {
    let mut out: Vec<Vec<u32>> = vec![vec![f32::NAN.to_bits(); table.names.len()]; table.rows()];
    let mut first = 0;
    for chunk in &table.chunks {
        for (column, _) in table.names.iter().enumerate() {
            chunk.column(column, 0..chunk.rows, |row, value| {
                out[first + row][column] = value.to_bits()
            });
        }
        first += chunk.rows;
    }
    let weight = |row: usize| table.weight.as_ref().map_or(0, |weight| weight[row].to_bits());
    let group = |row: usize| table.group.as_ref().map_or(0, |group| group[row]);
    out.into_iter()
        .enumerate()
        .map(|(row, values)| (table.label[row].to_bits(), weight(row), group(row), values))
        .collect()
}

pub fn read_on(ranks: usize, path: &Path, schema: &Schema) -> Vec<Result<Table>> {
    on_threads_with(&options(), ranks, |world| {
        let team = Team::new(2);
        let reader = Reader {
            schema,
            format: None,
            labeled: true,
            team: &team,
            spill: None,
            categories: None,
        };
        read(&world, path, &reader)
    })
}

/// The table of a file, which has the same rows on several ranks.
pub fn same_rows(path: &Path, schema: &Schema) -> Table {
    let alone = read_on(1, path, schema).remove(0).unwrap();
    for ranks in [2, 3, 7, 20] {
        let tables: Vec<Table> =
            read_on(ranks, path, schema).into_iter().map(|t| t.unwrap()).collect();
        let all: Vec<_> = tables.iter().flat_map(rows).collect();
        assert!(all == rows(&alone), "{} on {ranks} ranks", path.display());
        assert!(tables.iter().all(|table| table.categories == alone.categories));
        if schema.group.is_some() {
            // A group is on one rank.
            let mut seen = std::collections::HashMap::new();
            for (rank, table) in tables.iter().enumerate() {
                for group in table.group.iter().flatten() {
                    assert_eq!(*seen.entry(*group).or_insert(rank), rank);
                }
            }
        }
    }
    alone
}

#[test]
fn csv_on_several_ranks() {
    let folder = Folder::new("csv");
    let mut text = String::from("query,y,w,\"a,b\",city,c\n");
    for row in 0..500 {
        let city = ["Bern", "\"São, Paulo\"", "", "Oslo"][row * 7 % 4];
        let c =
            if row % 5 == 0 { String::new() } else { format!("{:.3}", row as f32 * 0.37 - 50.0) };
        writeln!(text, "q{},{},{},{},{city},{c}", row / 13, row % 3, 1 + row % 2, row % 11)
            .unwrap();
    }
    let path = folder.write("data.csv", text);
    let schema = Schema {
        label: Some("y".into()),
        weight: Some("w".into()),
        group: Some("query".into()),
        categorical: vec!["city".into()],
        ..Schema::default()
    };
    let table = same_rows(&path, &schema);
    assert_eq!(table.names, ["a,b", "city", "c"]);
    assert_eq!(table.categories[1].as_ref().unwrap(), &["Bern", "Oslo", "São, Paulo"]);
    assert_eq!(table.rows(), 500);
}

/// Text that does not fit in memory: values are in a file without a name, and the table is the same.
#[test]
fn large_text_is_spilled() {
    let folder = Folder::new("spill");
    let mut text = String::from("label,a,city\n");
    (0..450_000).for_each(|row| writeln!(text, "{},{}.5,x{}", row % 2, row, row % 3).unwrap());
    let path = folder.write("data.csv", text);
    let schema = Schema { categorical: vec!["city".into()], ..Schema::default() };
    let expected = read_on(1, &path, &schema).remove(0).unwrap();
    let team = Team::new(2);
    for (above, spilled) in [(1 << 20, true), (1 << 30, false)] {
        let spill = folder.0.join("binned");
        let reader = Reader {
            schema: &schema,
            format: None,
            labeled: true,
            team: &team,
            spill: Some(SpillTo { folder: &spill, above }),
            categories: None,
        };
        let table = read(&single_rank(), &path, &reader).unwrap();
        assert!(table.chunks.len() > 1);
        for chunk in &table.chunks {
            let Values::Columns { store, .. } = &chunk.values else { panic!("dense values") };
            assert_eq!(matches!(store, Store::Mapped(..)), spilled);
        }
        assert!(rows(&table) == rows(&expected));
        let files = std::fs::read_dir(&spill).map_or(0, |entries| entries.count());
        assert_eq!(files, 0, "the file has no name");
    }
}

#[test]
fn libsvm_on_several_ranks() {
    let folder = Folder::new("libsvm");
    let mut text = String::new();
    for row in 0..300usize {
        write!(text, "{}:{} qid:{}", row % 2, 1 + row % 3, row / 9).unwrap();
        for column in (0..30).filter(|column| (row * 31 + column * 17) % 7 == 0) {
            write!(text, " {column}:{}", (row + column) as f32 * 0.5).unwrap();
        }
        text.push('\n');
    }
    let path = folder.write("data.libsvm", text);
    let table = same_rows(&path, &Schema { group: Some("qid".into()), ..Schema::default() });
    assert_eq!((table.names.len(), table.rows()), (30, 300));
}

#[test]
fn many_libsvm_features_are_declared() {
    let folder = Folder::new("many");
    let path = folder.write("data.libsvm", "1 2000000:1\n");
    let error = read_on(2, &path, &Schema::default()).remove(0).err().unwrap().to_string();
    assert!(error.contains("line 1, column 2") && error.contains("set data.features"), "{error}");
    let declared = Schema { features: Some(2_000_001), ..Schema::default() };
    let table = read_on(1, &path, &declared).remove(0).unwrap();
    assert_eq!((table.rows(), table.names.len()), (1, 2_000_001));
}

fn npy(descr: &str, shape: &str, bytes: Vec<u8>) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((header.len() as u16).to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(bytes);
    out
}

#[test]
fn numpy_arrays_on_several_ranks() {
    let folder = Folder::new("npy");
    let x: Vec<u8> = (0..300).flat_map(|i| (i as f32 * 0.5).to_le_bytes()).collect();
    let y: Vec<u8> = (0..100i64).flat_map(|i| (i % 3).to_le_bytes()).collect();
    let path = folder.write("x.npy", npy("<f4", "(100, 3)", x.clone()));
    folder.write("y.npy", npy("<i8", "(100,)", y));
    let table = same_rows(&path, &Schema { label: Some("y.npy".into()), ..Schema::default() });
    assert_eq!((table.rows(), table.names.len(), table.label[5]), (100, 3, 2.0));
    // A label that is a column.
    let table = same_rows(&path, &Schema { label: Some("f1".into()), ..Schema::default() });
    assert_eq!((table.names.join(" "), table.label[2]), ("f0 f2".to_string(), 3.5));
    let wide: Vec<u8> = (0..300).flat_map(|i| (i as f64 * 0.5).to_le_bytes()).collect();
    let path = folder.write("wide.npy", npy("<f8", "(100, 3)", wide));
    same_rows(&path, &Schema { label: Some("y.npy".into()), ..Schema::default() });
    for (bytes, what) in [
        (npy("<f4", "(100, 4)", x.clone()), "describes 100 × 4 values"),
        (npy("<c8", "(100, 3)", x.clone()), "convert the array to float32"),
        (npy("<f4", "(1, 100, 3)", x), "3 dimensions"),
        (npy("<f4", "(1000000000000, 0)", Vec::new()), "no columns"),
        (b"PK".to_vec(), "not a .npy file"),
    ] {
        let path = folder.write("bad.npy", bytes);
        let error = read_on(2, &path, &Schema::default()).remove(0).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn errors_of_large_files_have_line_and_column() {
    let folder = Folder::new("lines");
    let mut text = String::from("label,a,b\n");
    (0..200_000).for_each(|row| writeln!(text, "{},{row},3", row % 2).unwrap());
    text.push_str("1,2\n");
    (0..1000).for_each(|_| text.push_str("1,2,3\n"));
    let path = folder.write("data.csv", text);
    for ranks in [1, 3] {
        for error in read_on(ranks, &path, &Schema::default()) {
            let error = error.err().unwrap().to_string();
            let expected = "data.csv: line 200002, column 3: the line has 2 fields, expected 3";
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn unreadable_files_are_rejected() {
    let folder = Folder::new("unreadable");
    let error =
        |path: &Path| read_on(2, path, &Schema::default()).remove(0).err().unwrap().to_string();
    assert!(error(&folder.0.join("missing.csv")).contains("cannot open"));
    assert!(error(&folder.write("data.xyz", "1")).contains("set data.format"));
    assert!(error(&folder.write("empty.csv", "")).contains("line 1, column 1: the file is empty"));
    std::fs::create_dir(folder.0.join("folder.csv")).unwrap();
    assert!(error(&folder.0.join("folder.csv")).contains("folder.csv"));
}

#[test]
fn binned_data_is_read_back() {
    let folder = Folder::new("cache");
    let (world, team) = (single_rank(), Team::new(1));
    let data = mixed(400);
    let bin = || Matrix::new(&world, &data.part(0..400), None, 300, &team).unwrap();
    let cache = |identity: &str| Cache {
        path: folder.0.join("x.bins"),
        identity: identity.into(),
        ranks: 1,
    };
    assert!(cache("a").load().is_none());
    let params = Params { rounds: 3, ..Params::default() };
    let model =
        |matrix: &Matrix| train(&world, matrix, &params).unwrap().to_bytes(ModelFormat::Ubj);
    let expected = model(&bin());
    assert!(model(&cache("a").save(bin()).unwrap()) == expected);
    assert!(model(&cache("a").load().unwrap()) == expected);
    assert!(cache("b").load().is_none(), "another identity");
    let path = folder.0.join("x.bins");
    let bytes = std::fs::read(&path).unwrap();
    for at in [0, 20, bytes.len() / 2, bytes.len() - 1] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(cache("a").load().is_none(), "corrupt at {at}");
    }
    std::fs::write(&path, &bytes[..10]).unwrap();
    assert!(cache("a").load().is_none());
}

#[test]
fn models_survive_json_and_ubj() {
    let folder = Folder::new("models");
    let (world, team) = (single_rank(), Team::new(1));
    let data = binary(mixed(800));
    let matrix = Matrix::new(&world, &data.part(0..800), None, 256, &team).unwrap();
    let params = Params {
        rounds: 5,
        scale_pos_weight: 2.0,
        objective: lockstep_gbdt::Objective::Logistic,
        ..Params::default()
    };
    let mut model = train(&world, &matrix, &params).unwrap();
    model.best_round = Some(2);
    model.features[0].name = "first".into();
    for format in [ModelFormat::Json, ModelFormat::Ubj] {
        let bytes = model.to_bytes(format);
        assert_eq!(Model::from_bytes(&bytes).unwrap(), model);
        assert_eq!(Model::from_bytes(&bytes).unwrap().to_bytes(format), bytes);
    }
    for name in ["model.json", "model.ubj"] {
        let path = folder.0.join(name);
        model.save(&path).unwrap();
        assert_eq!(Model::load(&path).unwrap(), model);
    }
    assert!(model.save(&folder.0.join("model.bin")).is_err());
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_needs_its_feature() {
    needs_feature("data.parquet", "--features parquet");
}

#[cfg(not(feature = "arrow"))]
#[test]
fn arrow_needs_its_feature() {
    needs_feature("data.arrow", "--features arrow");
}

#[cfg(not(all(feature = "arrow", feature = "parquet")))]
fn needs_feature(file: &str, what: &str) {
    let folder = Folder::new(file);
    let path = folder.write(file, "PAR1");
    let error = read_on(1, &path, &Schema::default()).remove(0).err().unwrap().to_string();
    assert!(error.contains(what), "{error}");
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_on_several_ranks() {
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type};
    use parquet::file::writer::SerializedFileWriter;
    let folder = Folder::new("parquet");
    let path = folder.0.join("data.parquet");
    let schema = "message rows { required int32 label; optional double x; required binary city (UTF8); required int32 q; }";
    let schema = parquet::schema::parser::parse_message_type(schema).unwrap();
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
    for group in 0..3 {
        let rows = group * 40..group * 40 + 40;
        let mut out = writer.next_row_group().unwrap();
        let labels: Vec<i32> = rows.clone().map(|row| row % 2).collect();
        let mut column = out.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&labels, None, None).unwrap();
        column.close().unwrap();
        let present: Vec<i16> = rows.clone().map(|row| i16::from(row % 3 != 0)).collect();
        let x: Vec<f64> =
            rows.clone().filter(|row| row % 3 != 0).map(|row| f64::from(row) * 0.5).collect();
        let mut column = out.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&x, Some(&present), None).unwrap();
        column.close().unwrap();
        let city: Vec<ByteArray> =
            rows.clone().map(|row| ["Oslo", "Bern"][row as usize % 2].into()).collect();
        let mut column = out.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&city, None, None).unwrap();
        column.close().unwrap();
        let q: Vec<i32> = rows.map(|row| row / 7).collect();
        let mut column = out.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&q, None, None).unwrap();
        column.close().unwrap();
        out.close().unwrap();
    }
    writer.close().unwrap();
    let schema =
        Schema { group: Some("q".into()), categorical: vec!["city".into()], ..Schema::default() };
    let table = same_rows(&path, &schema);
    assert_eq!((table.rows(), table.names.join(" ")), (120, "x city".to_string()));
    assert_eq!(table.categories[1].as_ref().unwrap(), &["Bern", "Oslo"]);
    assert_eq!(rows(&table)[4].3[0], 2.0f32.to_bits());
    assert!(f32::from_bits(rows(&table)[3].3[0]).is_nan());
}
