//! Arrow IPC files and streams on several ranks.

use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{Int32Builder, ListBuilder};
use arrow_array::types::Int32Type;
use arrow_array::*;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use lockstep_gbdt::Schema;
use lockstep_gbdt::data::Format;

use crate::files::{read_on, rows, same_rows};
use crate::mutations::read_mutations;
use crate::support::Folder;

/// Ids that differ only beyond the precision of f64.
const FIRST_QUERY: i64 = 1 << 60;

/// Three batches of 40 rows with the same dictionary, which the file format requires.
fn batches() -> Vec<RecordBatch> {
    let all = 0..120i64;
    let x = all.clone().map(|row| (row % 3 != 0).then_some(row as f64 * 0.5));
    let city = all.clone().map(|row| ["Oslo", "Bern"][row as usize % 2]);
    let kind: DictionaryArray<Int32Type> = all
        .clone()
        .map(|row| (row % 5 != 0).then_some(["b", "a", "c"][row as usize % 3]))
        .collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("label", Arc::new(Int8Array::from_iter_values(all.clone().map(|row| (row % 2) as i8)))),
        ("x", Arc::new(Float64Array::from_iter(x))),
        ("city", Arc::new(StringArray::from_iter_values(city))),
        ("kind", Arc::new(kind)),
        ("flag", Arc::new(BooleanArray::from_iter(all.clone().map(|row| Some(row % 4 == 0))))),
        ("w", Arc::new(Float32Array::from_iter_values(all.clone().map(|row| row as f32)))),
        ("none", Arc::new(NullArray::new(120))),
        ("q", Arc::new(Int64Array::from_iter_values(all.map(|row| FIRST_QUERY + row / 7)))),
    ];
    let columns = columns.into_iter().map(|(name, array)| (name, array, true));
    let whole = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    (0..3).map(|index| whole.slice(index * 40, 40)).collect()
}

fn write_file(path: &Path, batches: &[RecordBatch], compression: Option<CompressionType>) {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let file = std::fs::File::create(path).unwrap();
    let schema = batches[0].schema();
    let mut writer = FileWriter::try_new_with_options(file, &schema, options).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
}

fn schema() -> Schema {
    Schema {
        weight: Some("w".into()),
        group: Some("q".into()),
        categorical: vec!["city".into(), "kind".into()],
        ..Schema::default()
    }
}

#[test]
fn files_and_streams_on_several_ranks() {
    let folder = Folder::new("arrow");
    let batches = batches();
    let plain = folder.0.join("plain.arrow");
    write_file(&plain, &batches, None);
    let table = same_rows(&plain, &schema());
    assert_eq!((table.rows(), table.names.join(" ")), (120, "x city kind flag none".to_string()));
    assert_eq!(table.categories[1].as_ref().unwrap(), &["Bern", "Oslo"]);
    assert_eq!(table.categories[2].as_ref().unwrap(), &["a", "b", "c"]);
    let all = rows(&table);
    let bits = |values: [f32; 5]| values.map(f32::to_bits).to_vec();
    assert_eq!(all[4].3, bits([2.0, 1.0, 0.0, 1.0, f32::NAN]));
    assert_eq!(all[5].3, bits([2.5, 0.0, f32::NAN, 0.0, f32::NAN]));
    assert_eq!((all[5].0, all[5].1), (1f32.to_bits(), 5f32.to_bits()));
    // Queries that are neighbors as f64.
    assert_eq!((all[0].2 == all[6].2, all[6].2 == all[7].2), (true, false));
    for (name, compression) in
        [("lz4.feather", CompressionType::LZ4_FRAME), ("zstd.ipc", CompressionType::ZSTD)]
    {
        let path = folder.0.join(name);
        write_file(&path, &batches, Some(compression));
        assert!(rows(&same_rows(&path, &schema())) == all, "{name}");
    }
    let path = folder.0.join("stream.arrows");
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = StreamWriter::try_new(file, &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
    assert!(rows(&same_rows(&path, &schema())) == all, "stream");
}

#[test]
fn invalid_files_are_rejected() {
    let folder = Folder::new("bad-arrow");
    let error = |path: &Path, schema: &Schema| {
        read_on(2, path, schema).remove(0).err().unwrap().to_string()
    };
    let path = folder.0.join("data.arrow");
    write_file(&path, &batches(), None);
    let bytes = std::fs::read(&path).unwrap();
    let text = error(&path, &Schema::default());
    assert!(text.contains("line 1, column 3: text in a numeric column"), "{text}");
    for (bytes, what) in [
        (&bytes[..bytes.len() - 1], "truncated"),
        (&bytes[..30], "truncated"),
        (b"\xff\xff\xff\xff\x10\x00\x00\x00", "at byte 0 is truncated"),
        (b"label,a\n1,2\n", "it is not an Arrow IPC file or stream"),
        (b"", "the file is empty"),
    ] {
        let text = error(&folder.write("bad.arrow", bytes), &schema());
        assert!(text.contains(what), "{text}");
    }
    let mut list = ListBuilder::new(Int32Builder::new());
    list.append_value([Some(1), Some(2)]);
    let columns: Vec<(&str, ArrayRef)> =
        vec![("label", Arc::new(Int32Array::from(vec![1]))), ("l", Arc::new(list.finish()))];
    write_file(&path, &[RecordBatch::try_from_iter(columns).unwrap()], None);
    let text = error(&path, &Schema::default());
    assert!(text.contains("column \"l\" has the type List"), "{text}");
    same_rows(&path, &Schema { ignore: vec!["l".into()], ..Schema::default() });
}

#[test]
fn mutations() {
    let folder = Folder::new("mutated-arrow");
    let path = folder.0.join("data.arrow");
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("label", Arc::new(Int32Array::from_iter_values(0..20))),
        ("x", Arc::new(Float64Array::from_iter((0..20).map(|row| (row % 3 > 0).then_some(0.5))))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    for (name, compression) in [
        ("arrow", None),
        ("arrow-zstd", Some(CompressionType::ZSTD)),
        ("arrow-lz4", Some(CompressionType::LZ4_FRAME)),
    ] {
        write_file(&path, &[batch.clone(), batch.clone()], compression);
        read_mutations(name, Format::Arrow, &std::fs::read(&path).unwrap(), 1000);
    }
}
