//! Text and jsonl inputs become documents on any number of threads; unusable rows are reported.

use crate::test_dir::{TestDir, texts};
use lockstep_data::{
    Error, Format, GRAMMAR, Options, Recipe, Source, TokenFile, Tokenizer, prepare,
};
use proptest::prelude::*;

#[test]
fn jsonl_rows_are_documents() {
    let dir = TestDir::new();
    let rows = "{\"text\": \"one\\n\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"zwei ü\"}\r\n{\"text\":\"\"}\n{\"text\": \"3\"}";
    let input = dir.write("rows.jsonl", rows);
    let report = dir.prepare(&input, |_| ()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["one\n", "zwei ü", "3"]);
    assert_eq!((report.empty, report.bad), (1, 0));
    assert_eq!((report.files[0].documents, report.files[0].tokens, report.text_bytes), (3, 12, 12));
}

#[test]
fn another_field_can_be_the_text() {
    let dir = TestDir::new();
    let input = dir.write("rows.json", "{\"text\": 1, \"body\": \"that\"}\n");
    let report = dir.prepare(&input, |r| r.field = "body".into()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["that"]);
}

/// Splitting text into pieces of any size loses nothing.
#[test]
fn a_long_text_is_cut_at_blank_lines_and_loses_nothing() {
    let dir = TestDir::new();
    let text: String = (0..3000)
        .map(|i| format!("Zeile {i} mit ä und 漢字{}", if i % 7 == 6 { "\n\n" } else { "\n" }))
        .collect();
    let input = dir.write("long.txt", &text);
    for cut in [1, 100, 4096, 30_000, 0] {
        let report = dir.prepare(&input, |r| r.cut = cut).unwrap();
        let documents = texts(&report.files[0].path);
        assert_eq!(documents.concat(), text, "cut {cut}");
        let (last, rest) = documents.split_last().unwrap();
        assert!(rest.iter().all(|d| d.len() >= cut && d.ends_with('\n')), "cut {cut}");
        if (300..cut.max(1)).contains(&last.len()) || cut >= 4096 {
            assert!(rest.iter().all(|d| d.ends_with("\n\n") && d.len() < cut + 400), "cut {cut}");
        }
        assert_eq!(rest.is_empty(), cut == 0);
    }
}

#[test]
fn a_text_without_lines_is_cut_between_words() {
    let dir = TestDir::new();
    let text = "wörter und mehr ".repeat(20_000);
    let input = dir.write("flat.txt", text.trim_end());
    let report = dir.prepare(&input, |r| r.cut = 10_000).unwrap();
    let documents = texts(&report.files[0].path);
    assert_eq!(documents.concat(), text.trim_end());
    assert!(documents.len() > 10 && documents.iter().all(|d| d.len() < 41_000));
    assert!(documents[..documents.len() - 1].iter().all(|d| d.ends_with(' ')));
}

#[test]
fn a_separator_ends_documents() {
    let dir = TestDir::new();
    let input = dir.write("s.txt", "one\n<|end|>\ntwo\nlines\n<|end|><|end|>three\r\n");
    let report = dir.prepare(&input, |r| r.split_on = Some("<|end|>".into())).unwrap();
    assert_eq!(texts(&report.files[0].path), ["one", "two\nlines", "three"]);
    let report = dir.prepare(&input, |r| r.split_on = Some("\n".into())).unwrap();
    assert_eq!(report.files[0].documents, 5);
}

#[test]
fn output_does_not_depend_on_the_number_of_threads() {
    let dir = TestDir::new();
    let mut rows = String::new();
    for i in 0..4000 {
        match i % 97 {
            5 => rows.push_str("not json\n"),
            _ => rows
                .push_str(&format!("{{\"text\": \"{}\"}}\n", format!("word{i} ").repeat(i % 50))),
        }
    }
    let input = dir.write("rows.jsonl", &rows);
    let outputs: Vec<_> = [1, 2, 3, 8]
        .map(|threads| {
            let mut report = dir.prepare(&input, |r| r.threads = threads).unwrap();
            let path = report.files.remove(0).path;
            (std::fs::read(path).unwrap(), report)
        })
        .into();
    for other in &outputs[1..] {
        assert_eq!(outputs[0].1, other.1);
        assert!(outputs[0].0 == other.0, "the files differ");
    }
    assert_eq!((outputs[0].1.bad, outputs[0].1.first_bad[1].line), (42, 103));
}

#[test]
fn bad_rows_are_counted_and_reported() {
    let dir = TestDir::new();
    let mut rows =
        b"{\"text\": \"good\"}\n{\"text\": \"b\xff\"}\n{\"body\": \"x\"}\n{\"text\": 1}\n".to_vec();
    rows.extend(b"{\"text\"\n[]\n{\"text\": \"good too\"}\n");
    let input = dir.write("rows.jsonl", rows);
    let report = dir.prepare(&input, |_| ()).unwrap();
    assert_eq!(report.bad, 5);
    let lines: Vec<_> = report.first_bad.iter().map(|row| row.line).collect();
    assert_eq!(lines, [2, 3, 4, 5, 6]);
    for (row, reason) in report.first_bad.iter().zip([
        "UTF-8",
        "no field \"text\"; fields are: body",
        "integer",
        "JSON",
        "object",
    ]) {
        assert!(row.reason.contains(reason), "{row}");
    }

    let error = dir.prepare(&input, |r| r.max_bad = 2).unwrap_err();
    let Error::BadRows { allowed: 2, found: 3, first } = &error else { panic!("{error}") };
    assert_eq!(first.len(), 3);
    assert!(error.to_string().contains("rows.jsonl:3: no field"), "{error}");
}

#[test]
fn invalid_utf8_lines_are_skipped() {
    let dir = TestDir::new();
    let input = dir.write("t.txt", b"one\ntwo \xff\nthree\nfo\xc3");
    let report = dir.prepare(&input, |_| ()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["one\nthree\nfo"]);
    let reason = |at: usize| report.first_bad[at].reason.split(';').next().unwrap();
    let bad: Vec<_> = (0..2).map(|at| (report.first_bad[at].line, reason(at))).collect();
    assert_eq!(bad, [(2, "not UTF-8"), (4, "ends in the middle of a UTF-8 character")]);
}

#[test]
fn a_file_in_another_encoding_is_named_with_a_fix() {
    let dir = TestDir::new();
    let input = dir.write("latin.txt", b"caf\xe9\n");
    let error = dir.prepare(&input, |_| ()).unwrap_err().to_string();
    assert!(error.contains("latin.txt:1: not UTF-8; convert the file"), "{error}");
    let error = dir.prepare(&input, |r| r.max_bad = 0).unwrap_err().to_string();
    assert!(error.starts_with("1 bad row; at most 0 are allowed"), "{error}");
}

#[test]
fn a_missing_file_is_missing_not_of_an_unknown_format() {
    let dir = TestDir::new();
    let error = dir.prepare(&dir.path("missing"), |_| ()).unwrap_err().to_string();
    assert!(error.contains("missing: No such file"), "{error}");
}

/// A failure leaves neither the output file nor a temporary file.
#[test]
fn a_failed_prepare_leaves_nothing() {
    let dir = TestDir::new();
    let bad = dir.write("bad.jsonl", "no\n");
    dir.prepare(&bad, |r| r.max_bad = 0).unwrap_err();
    dir.prepare(&bad, |_| ()).unwrap_err();
    assert_eq!(dir.names(), ["bad.jsonl"]);

    // Temporary files of a killed program are removed, and an existing output file stays until the new one is complete.
    dir.write("out.tokens", "before");
    dir.write(".out.tokens.partial-1", "left over");
    dir.prepare(&bad, |_| ()).unwrap_err();
    assert_eq!(dir.names(), ["bad.jsonl", "out.tokens"]);
    assert_eq!(std::fs::read(dir.path("out.tokens")).unwrap(), b"before");
}

#[test]
fn existing_files_need_force() {
    let dir = TestDir::new();
    let input = dir.write("a.txt", "text");
    dir.write("out.tokens", "mine");
    let error = dir.prepare(&input, |r| r.replace = false).unwrap_err();
    assert!(error.to_string().contains("--force"), "{error}");
    dir.prepare(&input, |_| ()).unwrap();
    assert_eq!(texts(&dir.path("out.tokens")), ["text"]);
}

#[test]
fn several_inputs_become_one_file_or_one_each() {
    let dir = TestDir::new();
    let inputs = vec![dir.write("b.txt", "from b"), dir.write("a.jsonl", "{\"text\": \"from a\"}")];
    let report = prepare(&Recipe::new(inputs.clone(), dir.path("all.tokens")), &|_| ()).unwrap();
    assert_eq!(texts(&report.files[0].path), ["from b", "from a"]);

    let folder = format!("{}/", dir.path("each").display());
    let report = prepare(&Recipe::new(inputs, folder), &|_| ()).unwrap();
    let each: Vec<_> = report.files.iter().map(|made| texts(&made.path)[0].clone()).collect();
    assert_eq!(each, ["from b", "from a"]);
    // The files of a folder are read in the order of their names.
    let report = prepare(&Recipe::new(vec![dir.path("")], dir.path("folder.tokens")), &|_| ());
    assert_eq!(texts(&report.unwrap().files[0].path), ["from a", "from b"]);
}

#[test]
fn errors_suggest_a_fix() {
    let dir = TestDir::new();
    let text = dir.write("a.txt", "text");
    let odd = dir.write("a.bin", "text");
    for (input, how, hint) in [
        (&odd, (|_| ()) as fn(&mut Recipe), "--format"),
        (&dir.path("none.txt"), |_| (), "none.txt: No such file"),
        (&text, |r| r.threads = 0, "--threads"),
        (&text, |r| r.split_on = Some(String::new()), "--split-on"),
        (&text, |r| r.format = Some(Format::Jsonl), "not JSON"),
        (&text, |r| r.inputs.push(r.inputs[0].with_file_name("empty")), "file in this folder"),
        (&text, |r| r.out = r.inputs[0].with_file_name("no/where"), "No such file"),
    ] {
        std::fs::create_dir_all(dir.path("empty")).unwrap();
        let error = dir.prepare(input, how).unwrap_err();
        assert!(error.to_string().contains(hint), "{error}");
    }
    let empty = dir.write("nothing.txt", "");
    let error = dir.prepare(&empty, |_| ()).unwrap_err();
    assert!(error.to_string().contains("no documents in"), "{error}");
}

#[cfg(not(feature = "tokenizers"))]
#[test]
fn missing_tokenizers_feature_is_named() {
    let dir = TestDir::new();
    let json = dir.write("tokenizer.json", "{}");
    let error = lockstep_data::Tokenizer::open(json.to_str().unwrap(), None).unwrap_err();
    assert!(error.to_string().contains("--features tokenizers"), "{error}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn missing_parquet_feature_is_named() {
    let dir = TestDir::new();
    let error = dir.prepare(&dir.write("a.parquet", "PAR1"), |_| ()).unwrap_err();
    assert!(error.to_string().contains("--features parquet"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_documents_come_back(documents in proptest::collection::vec("\\PC{0,40}|[ -~\n]{1,2000}", 1..40)) {
        let dir = TestDir::new();
        let kept: Vec<_> = documents.iter().filter(|d| !d.is_empty()).collect();
        prop_assume!(!kept.is_empty());
        let path = dir.documents(&documents);
        prop_assert_eq!(texts(&path), kept.iter().map(|d| d.to_string()).collect::<Vec<_>>());
        TokenFile::open(&path).unwrap().check(|_| ()).unwrap();
    }
}

#[test]
fn a_stored_tokenizer_is_loaded_without_the_data() {
    let dir = TestDir::new();
    let path = dir.documents(&["an owl"]);
    for (spec, vocab, end) in [(path.to_str().unwrap(), 257, Some(256)), (GRAMMAR, 256, None)] {
        let source = Source::open(spec, &Options { held_out: 0.0 }).unwrap();
        source.stored_tokenizer().write(&dir.path("")).unwrap();
        let loaded = Tokenizer::load(&dir.path("")).unwrap().expect("a tokenizer");
        assert_eq!((loaded.vocab(), loaded.end()), (vocab, end));
        assert_eq!(loaded.encode("né").unwrap(), source.encode("né").unwrap());
        assert_eq!(source.end(), end);
    }
    assert!(Tokenizer::load(&dir.path("missing")).unwrap().is_none());
}
