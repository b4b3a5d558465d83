//! The language of `builtin:grammar`: small sentences about animals, in which verbs agree with their
//! subjects, brackets and quotation marks are balanced, clauses are nested, and the first word determines the
//! punctuation at the end.

use super::phrase::{Phrase, choice, optional, sequence, text, word, word_with};
use Number::{Many, One};

#[derive(Clone, Copy)]
enum Number {
    One,
    Many,
}

/// A sentence with punctuation and line end.
pub fn sentence() -> Phrase {
    let plain = sequence([clause(2), optional(0.25, sequence([joint(), clause(1)])), text(".\n")]);
    choice([(6.0, plain), (2.0, sequence([question(), text("?\n")])), (1.5, speech())])
}

/// `the frog says: "two owls sing."`
fn speech() -> Phrase {
    let say = |number| match number {
        One => word(&["says", "sings", "thinks"]),
        Many => word(&["say", "sing", "think"]),
    };
    let said = |number| sequence([subject(number, 0), text(" "), say(number)]);
    sequence([either(said), text(": \""), clause(0), text(".\"\n")])
}

/// `does the owl hear a frog`: the auxiliary agrees with the subject.
fn question() -> Phrase {
    let asked = |number| {
        let helper = text(match number {
            One => "does ",
            Many => "do ",
        });
        sequence([helper, subject(number, 1), text(" "), deed(Many, 0)])
    };
    either(asked)
}

/// A subject and a predicate, with clauses nested up to `depth`.
fn clause(depth: usize) -> Phrase {
    either(|number| sequence([subject(number, depth), text(" "), deed(number, depth)]))
}

/// Singular or plural.
fn either(of: impl Fn(Number) -> Phrase) -> Phrase {
    choice([(3.0, of(One)), (2.0, of(Many))])
}

/// `the old lion (a king) that two hens chase`
fn subject(number: Number, depth: usize) -> Phrase {
    let aside = sequence([text(" ("), being(number), text(")")]);
    let more = match depth {
        0 => text(""),
        _ => choice([(0.76, text("")), (0.1, aside), (0.14, relative(number, depth - 1))]),
    };
    sequence([being(number), more])
}

fn object(depth: usize) -> Phrase {
    either(|number| subject(number, depth.min(1)))
}

/// `that sleeps by the river`, or `that two hens follow`
fn relative(number: Number, depth: usize) -> Phrase {
    let followed = either(|other| sequence([subject(other, depth), text(" "), touch(other)]));
    sequence([text(" that "), choice([(1.0, deed(number, depth)), (1.0, followed)])])
}

/// `a wise king`, `two owls`
fn being(number: Number) -> Phrase {
    let manner = optional(0.4, sequence([word(&MANNERS), text(" ")]));
    match number {
        One => {
            let known = choice([(4.0, text("the ")), (1.0, text("my "))]);
            let odd = sequence([article(&MANNERS), text(" "), word(&NAMES)]);
            let unknown = choice([(0.4, odd), (0.6, article(&NAMES))]);
            choice([(5.0, sequence([known, manner, word(&NAMES)])), (3.0, unknown)])
        }
        Many => {
            let which = [(4.0, "the "), (2.0, "two "), (2.0, "some "), (1.0, "my ")];
            let which = choice(which.map(|(weight, which)| (weight, text(which))));
            sequence([which, manner, word(&NAMES), text("s")])
        }
    }
}

/// One of these words with `a`, or `an` before a vowel.
fn article(words: &[&'static str]) -> Phrase {
    let before =
        |word: &str| if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an " } else { "a " };
    word_with(words, |word| sequence([text(before(word)), text(word)]))
}

/// `sleeps near the mill`, or `paints a king`
fn deed(number: Number, depth: usize) -> Phrase {
    let place =
        sequence([text(" "), word(&["in", "by", "near", "on"]), text(" the "), word(&PLACES)]);
    choice([
        (1.0, sequence([verb(number, &RESTS), optional(0.5, place)])),
        (1.0, sequence([touch(number), text(" "), object(depth)])),
    ])
}

fn touch(number: Number) -> Phrase {
    verb(number, &TOUCHES)
}

/// Singular verbs end in s.
fn verb(number: Number, words: &[&'static str]) -> Phrase {
    match number {
        One => sequence([word(words), text("s")]),
        Many => word(words),
    }
}

fn joint() -> Phrase {
    choice([(2.0, text(" and ")), (1.0, text(" but ")), (1.0, text(", so "))])
}

// The words are chosen such that every text has one derivation; a test checks this.

const NAMES: [&str; 20] = [
    "cat", "dog", "owl", "king", "hen", "bear", "frog", "pig", "mole", "swan", "ape", "judge",
    "toad", "lion", "bee", "rat", "cook", "nun", "yak", "elk",
];
const MANNERS: [&str; 12] =
    ["old", "big", "red", "sly", "wise", "tiny", "kind", "loud", "calm", "fat", "happy", "odd"];
const TOUCHES: [&str; 12] = [
    "see", "like", "help", "chase", "hug", "paint", "find", "know", "lift", "admire", "join",
    "bite",
];
const RESTS: [&str; 10] =
    ["sleep", "sing", "run", "wait", "smile", "jump", "dance", "swim", "nod", "yawn"];
const PLACES: [&str; 10] =
    ["river", "hill", "wood", "barn", "lake", "tower", "moon", "sea", "cave", "inn"];
