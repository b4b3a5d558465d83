//! A small tokenizer.json: words, an end token, a template that would add tokens, and a truncation that would shorten
//! documents.

use crate::test_dir::{TestDir, open, texts};
use lockstep_data::{SampleId, Split, TokenFile, Tokenizer, Width};
use std::path::PathBuf;

fn tokenizer_json(dir: &TestDir, extra_words: usize) -> PathBuf {
    let mut vocab =
        serde_json::json!({ "[UNK]": 0, "the": 1, "owl": 2, "sings": 3, "<|endoftext|>": 4 });
    for i in 0..extra_words {
        vocab[format!("w{i}")] = (5 + i).into();
    }
    let json = serde_json::json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
        "padding": { "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]" },
        "added_tokens": [{ "id": 4, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false, "special": true }],
        "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<|endoftext|>", "type_id": 0 } },
                       { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }],
            "special_tokens": { "<|endoftext|>":
                { "id": "<|endoftext|>", "ids": [4], "tokens": ["<|endoftext|>"] } } },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" }
    });
    dir.write("tokenizer.json", json.to_string())
}

fn opened(dir: &TestDir, extra_words: usize) -> Tokenizer {
    Tokenizer::open(tokenizer_json(dir, extra_words).to_str().unwrap(), None).unwrap()
}

/// Documents are not truncated or padded, no tokens are added, and a special token in a document is plain text.
#[test]
fn documents_are_encoded_as_they_are() {
    let dir = TestDir::new();
    let tokenizer = opened(&dir, 0);
    assert_eq!((tokenizer.vocab(), tokenizer.end()), (5, Some(4)));
    assert_eq!(tokenizer.encode("the owl sings the owl").unwrap(), [1, 2, 3, 1, 2]);
    assert_eq!(tokenizer.encode("the <|endoftext|>owl").unwrap(), [1, 0]);
    assert_eq!(tokenizer.decode(&[1, 2, 4]).unwrap(), "the owl <|endoftext|>");
}

#[test]
fn a_token_file_carries_its_tokenizer() {
    let dir = TestDir::new();
    for (extra_words, width) in [(0, Width::Two), (70_000, Width::Four)] {
        let input = dir.write("a.txt", "the owl\n\nsings w69999");
        let report = dir
            .prepare(&input, |r| {
                r.tokenizer = opened(&dir, extra_words);
                r.split_on = Some("\n\n".into());
            })
            .unwrap();
        std::fs::remove_file(dir.path("tokenizer.json")).unwrap();
        let path = &report.files[0].path;
        let file = TokenFile::open(path).unwrap();
        file.check(|_| ()).unwrap();
        assert_eq!((file.width(), file.vocab()), (width, 5 + extra_words as u32));
        assert!(file.tokenizer_name().starts_with("tokenizer.json "));
        let last = if extra_words == 0 { "[UNK]" } else { "w69999" };
        assert_eq!(texts(path), ["the owl".to_string(), format!("sings {last}")]);

        let source = open(path, 0.0);
        assert_eq!(source.encode("sings").unwrap(), [3]);
        let mut tokens = [0; 7];
        source.sample(
            SampleId { split: Split::Train, seed: 1, batch: 0, global_batch: 1, index: 0 },
            &mut tokens,
        );
        assert_eq!(tokens.iter().filter(|t| **t == 4).count(), 2, "{tokens:?}");
    }
}

/// Documents are held out by their text, so two tokenizers hold out the same ones.
#[test]
fn held_out_documents_do_not_depend_on_the_tokenizer() {
    let dir = TestDir::new();
    let rows: String = (0..100).map(|i| format!("{{\"text\": \"w{i}\"}}\n")).collect();
    let input = dir.write("rows.jsonl", rows);
    let held = |hugging_face: bool| {
        dir.prepare(&input, |r| {
            if hugging_face {
                r.tokenizer = opened(&dir, 100);
            }
        })
        .unwrap();
        let source = open(&dir.path("out.tokens"), 0.3);
        let epoch = source.epoch_tokens(Split::HeldOut).unwrap() as usize;
        let mut tokens = vec![0; epoch + 1];
        source.sample(
            SampleId { split: Split::HeldOut, seed: 0, batch: 0, global_batch: 1, index: 0 },
            &mut tokens,
        );
        let text = source.decode(&tokens[..epoch]).unwrap();
        let mut words: Vec<_> = text
            .split("<|endoftext|>")
            .map(|w| w.trim().to_string())
            .filter(|w| !w.is_empty())
            .collect();
        words.sort();
        words
    };
    assert_eq!(held(false), held(true));
    assert!(held(true).len() > 10);
}

#[test]
fn unknown_end_token_is_reported() {
    let dir = TestDir::new();
    let path = tokenizer_json(&dir, 0);
    let error = Tokenizer::open(path.to_str().unwrap(), Some("</s>")).unwrap_err();
    assert!(error.to_string().contains("no token </s>"), "{error}");
    let broken = dir.write("broken.json", "{}");
    let error = Tokenizer::open(broken.to_str().unwrap(), None).unwrap_err();
    assert!(error.to_string().contains("broken.json: reading"), "{error}");
}

/// The tokenizer.json of the byte tokenizer, read by Hugging Face's library.
#[test]
fn exported_byte_tokenizer_encodes_bytes() {
    let dir = TestDir::new();
    let source = open(&dir.documents(&["an owl"]), 0.0);
    source.stored_tokenizer().write(&dir.path("")).unwrap();
    // `open` does not recognize the byte tokenizer.
    let read = Tokenizer::open(dir.path("tokenizer.json").to_str().unwrap(), None).unwrap();
    assert_eq!((read.vocab(), read.end()), (257, Some(256)));
    let text: String = (0..0x250).filter_map(char::from_u32).collect();
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    assert_eq!(read.encode(&text).unwrap(), bytes);
    assert_eq!(read.decode(&bytes).unwrap(), text);
}

#[test]
fn a_run_folder_carries_its_tokenizer() {
    let dir = TestDir::new();
    let input = dir.write("a.txt", "the owl sings");
    dir.prepare(&input, |r| r.tokenizer = opened(&dir, 0)).unwrap();
    let source = open(&dir.path("out.tokens"), 0.0);
    std::fs::create_dir(dir.path("run")).unwrap();
    source.stored_tokenizer().write(&dir.path("run")).unwrap();
    let loaded = Tokenizer::load(&dir.path("run")).unwrap().expect("a tokenizer");
    assert_eq!((loaded.vocab(), loaded.end()), (5, Some(4)));
    assert_eq!(loaded.encode("the owl").unwrap(), [1, 2]);
}
