//! The language of `builtin:grammar`: small sentences about animals, in which verbs agree with their
//! subjects, brackets and quotation marks close, clauses sit inside clauses, and a question is known
//! by its first word long before its last mark. Only the language: what it costs to predict it is
//! worked out elsewhere.

use super::phrase::{Phrase, choice, perhaps, row, text, word, word_with};
use Number::{Many, One};

#[derive(Clone, Copy)]
enum Number {
    One,
    Many,
}

/// A sentence with its mark and the end of its line.
pub fn sentence() -> Phrase {
    let plain = row([clause(2), perhaps(0.25, row([joint(), clause(1)])), text(".\n")]);
    choice([(6.0, plain), (2.0, row([question(), text("?\n")])), (1.5, speech())])
}

/// `the frog says: "two owls sing."`
fn speech() -> Phrase {
    let say = |number| match number {
        One => word(&["says", "sings", "thinks"]),
        Many => word(&["say", "sing", "think"]),
    };
    let said = |number| row([subject(number, 0), text(" "), say(number)]);
    row([either(said), text(": \""), clause(0), text(".\"\n")])
}

/// `does the owl hear a frog`: the verb stays plain, for its helper has agreed with the subject.
fn question() -> Phrase {
    let asked = |number| {
        let helper = text(match number {
            One => "does ",
            Many => "do ",
        });
        row([helper, subject(number, 1), text(" "), deed(Many, 0)])
    };
    either(asked)
}

/// A subject and what it does. Clauses sit inside it `depth` deep.
fn clause(depth: usize) -> Phrase {
    either(|number| row([subject(number, depth), text(" "), deed(number, depth)]))
}

/// Whatever has a subject is about one or about many.
fn either(of: impl Fn(Number) -> Phrase) -> Phrase {
    choice([(3.0, of(One)), (2.0, of(Many))])
}

/// `the old lion (a king) that two hens chase`
fn subject(number: Number, depth: usize) -> Phrase {
    let aside = row([text(" ("), being(number), text(")")]);
    let more = match depth {
        0 => text(""),
        _ => choice([(0.76, text("")), (0.1, aside), (0.14, relative(number, depth - 1))]),
    };
    row([being(number), more])
}

fn object(depth: usize) -> Phrase {
    either(|number| subject(number, depth.min(1)))
}

/// `that sleeps by the river`, or `that two hens follow`
fn relative(number: Number, depth: usize) -> Phrase {
    let followed = either(|other| row([subject(other, depth), text(" "), touch(other)]));
    row([text(" that "), choice([(1.0, deed(number, depth)), (1.0, followed)])])
}

/// `a wise king`, `two owls`
fn being(number: Number) -> Phrase {
    let manner = perhaps(0.4, row([word(&MANNERS), text(" ")]));
    match number {
        One => {
            let known = choice([(4.0, text("the ")), (1.0, text("my "))]);
            let odd = row([article(&MANNERS), text(" "), word(&NAMES)]);
            let unknown = choice([(0.4, odd), (0.6, article(&NAMES))]);
            choice([(5.0, row([known, manner, word(&NAMES)])), (3.0, unknown)])
        }
        Many => {
            let which = [(4.0, "the "), (2.0, "two "), (2.0, "some "), (1.0, "my ")];
            let which = choice(which.map(|(weight, which)| (weight, text(which))));
            row([which, manner, word(&NAMES), text("s")])
        }
    }
}

/// One of these words with `a`, or `an` before a vowel: the article looks ahead.
fn article(words: &[&'static str]) -> Phrase {
    let before =
        |word: &str| if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an " } else { "a " };
    word_with(words, |word| row([text(before(word)), text(word)]))
}

/// `sleeps near the mill`, or `paints a king`
fn deed(number: Number, depth: usize) -> Phrase {
    let place = row([text(" "), word(&["in", "by", "near", "on"]), text(" the "), word(&PLACES)]);
    choice([
        (1.0, row([verb(number, &RESTS), perhaps(0.5, place)])),
        (1.0, row([touch(number), text(" "), object(depth)])),
    ])
}

fn touch(number: Number) -> Phrase {
    verb(number, &TOUCHES)
}

/// Verbs of one end in s.
fn verb(number: Number, words: &[&'static str]) -> Phrase {
    match number {
        One => row([word(words), text("s")]),
        Many => word(words),
    }
}

fn joint() -> Phrase {
    choice([(2.0, text(" and ")), (1.0, text(" but ")), (1.0, text(", so "))])
}

// Words are such that a text has one derivation only; the tests would find it out if not.

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
