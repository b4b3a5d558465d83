//! A text column of a parquet file becomes documents; other columns are errors.

use crate::test_dir::{TestDir, texts};
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::path::PathBuf;
use std::sync::Arc;

/// A table of ids, texts (some null), and lists, in groups of rows.
fn table(dir: &TestDir, groups: &[Vec<Option<&[u8]>>], compression: Compression) -> PathBuf {
    let schema = "message table { required int64 id; optional binary text (STRING); required binary body; \
                  repeated binary many (STRING); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let path = dir.path("table.parquet");
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    for rows in groups {
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();

        let array = |bytes: &[u8]| ByteArray::from(bytes.to_vec());
        let present: Vec<_> = rows.iter().flatten().map(|text| array(text)).collect();
        let levels: Vec<i16> = rows.iter().map(|row| row.is_some().into()).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&present, Some(&levels), None).unwrap();
        column.close().unwrap();

        let bodies: Vec<_> = ids.iter().map(|id| array(format!("body {id}").as_bytes())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&bodies, None, None).unwrap();
        column.close().unwrap();

        let none = vec![0; rows.len()];
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[], Some(&none), Some(&none)).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    path
}

#[test]
fn a_column_becomes_documents_in_order() {
    let dir = TestDir::new();
    let words: Vec<String> = (0..3000).map(|i| format!("row {i} ä")).collect();
    let groups: Vec<Vec<_>> =
        words.chunks(700).map(|g| g.iter().map(|w| Some(w.as_bytes())).collect()).collect();
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(Default::default()),
        Compression::GZIP(Default::default()),
    ] {
        let input = table(&dir, &groups, compression);
        let report = dir.prepare(&input, |_| ()).unwrap();
        assert_eq!(texts(&report.files[0].path), words, "{compression}");
        assert_eq!((report.bad, report.empty), (0, 0));
    }
}

#[test]
fn rows_without_text_are_bad() {
    let dir = TestDir::new();
    let groups =
        [vec![Some(&b"one"[..]), None, Some(b"\xff"), Some(b"")], vec![Some(b"two"), None]];
    let report = dir.prepare(&table(&dir, &groups, Compression::SNAPPY), |_| ()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["one", "two"]);
    assert_eq!((report.bad, report.empty), (3, 1));
    let mut rows: Vec<_> = report.first_bad.iter().map(|row| row.line).collect();
    rows.sort();
    assert_eq!(rows, [2, 3, 6]);
}

#[test]
fn another_column_can_be_the_text() {
    let dir = TestDir::new();
    let input = table(&dir, &[vec![None, None]], Compression::SNAPPY);
    let report = dir.prepare(&input, |r| r.field = "body".into()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["body 0", "body 1"]);
}

#[test]
fn errors_suggest_a_fix() {
    let dir = TestDir::new();
    let input = table(&dir, &[vec![None]], Compression::SNAPPY);
    for (field, hint) in [
        ("txt", "columns are: id, text, body, many"),
        ("id", "must contain one string per row, but its type is INT64"),
        ("many", "must contain one string per row"),
    ] {
        let error = dir.prepare(&input, |r| r.field = field.into()).unwrap_err();
        assert!(error.to_string().contains(hint), "{error}");
    }
    let broken = dir.write("broken.parquet", "PAR1, but no more");
    let error = dir.prepare(&broken, |_| ()).unwrap_err();
    assert!(error.to_string().contains("broken.parquet"), "{error}");
}
