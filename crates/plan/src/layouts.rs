//! Layouts to verify a model on: every axis alone, then combinations that cover pairs of options not seen before.
//! Validity is decided by `Plan::resolve`.

use std::collections::HashSet;

use crate::config::Config;
use crate::plan::Plan;
use crate::resolve::Environment;

/// Returns at most `count` layouts of 2 to `ranks` ranks that are valid for `config` with a vocabulary of `vocab`
/// tokens, in the syntax of `Config::with_layout`. Deterministic.
///
/// The list starts with each axis alone, at its smallest degree and with each of its options. It continues with the
/// layout that adds the most new words, then the most new pairs of words. No axis has more than four ranks: larger
/// degrees find no other bugs.
///
/// ```
/// use lockstep_plan::{Config, layouts};
///
/// let config = Config::parse("[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 2", &[]);
/// let some = layouts(&config, 64, 2, 8);
/// assert_eq!(some[..3], ["data=2", "data=2 zero=1", "data=2 zero=2"]);
/// ```
pub fn layouts(config: &Config, vocab: usize, ranks: usize, count: usize) -> Vec<String> {
    let allowed = allowed(config, vocab, ranks);
    let pairs: Vec<Vec<(&str, &str)>> = allowed.iter().map(|words| pairs(words)).collect();
    let mut chosen = single_axes(&allowed);
    chosen.truncate(count);
    let mut seen: HashSet<(&str, &str)> =
        chosen.iter().flat_map(|index| &pairs[*index]).copied().collect();
    while chosen.len() < count {
        let new = |index: &usize| {
            let new = pairs[*index].iter().filter(|pair| !seen.contains(pair));
            let words = new.clone().filter(|(first, second)| first == second).count();
            (words, new.count())
        };
        // Ties go to the first, which has the fewest ranks.
        let best = (0..allowed.len()).rev().max_by_key(new);
        let Some(best) = best.filter(|best| new(best).1 > 0) else { break };
        seen.extend(&pairs[best]);
        chosen.push(best);
    }
    chosen.into_iter().map(|index| allowed[index].clone()).collect()
}

/// All valid layouts, ordered by number of ranks.
fn allowed(config: &Config, vocab: usize, ranks: usize) -> Vec<String> {
    let fits = |words: &str| {
        let config = config.with_layout(words);
        let env = Environment::one_host(config.ranks(), 1).with_vocab(vocab);
        Plan::resolve(&config, &env).is_ok()
    };
    let mut all: Vec<(usize, String)> = Vec::new();
    for degrees in degrees(ranks) {
        let ranks = degrees.iter().product();
        all.extend(
            with_options(degrees)
                .into_iter()
                .filter(|words| fits(words))
                .map(|words| (ranks, words)),
        );
    }
    all.sort_by_key(|(ranks, _)| *ranks);
    all.into_iter().map(|(_, words)| words).collect()
}

/// All degrees of data, tensor, context and pipe with a product of 2 to `ranks`.
fn degrees(ranks: usize) -> Vec<[usize; 4]> {
    let up_to = |most: usize| 1..=most.min(4);
    let all = up_to(ranks).flat_map(|data| {
        up_to(ranks / data).flat_map(move |tensor| {
            up_to(ranks / data / tensor).flat_map(move |context| {
                up_to(ranks / data / tensor / context)
                    .map(move |pipe| [data, tensor, context, pipe])
            })
        })
    });
    all.filter(|degrees| degrees.iter().any(|degree| *degree > 1)).collect()
}

/// The degrees with every combination of options, as text. Defaults are left out.
fn with_options([data, tensor, context, pipe]: [usize; 4]) -> Vec<String> {
    let replicas = data * context;
    let divisors = || (2..=replicas).filter(|part| replicas.is_multiple_of(*part));
    let degree = |key: &str, degree: usize| match degree {
        1 => String::new(),
        _ => format!("{key}={degree}"),
    };
    let options = |there: bool, options: &[&str]| match there {
        true => [""].iter().chain(options).map(|words| words.to_string()).collect(),
        false => vec![String::new()],
    };
    let mut zero =
        options(replicas > 1, &["zero=1", "zero=2", "zero=3", "zero=3 keep_gathered=true"]);
    for shard in divisors().filter(|shard| *shard < replicas) {
        zero.extend((1..=3).map(|zero| format!("zero={zero} shard={shard}")));
    }
    let mut context_kind = options(context > 1, &["context_kind=ulysses"]);
    // `both` needs at least a ring of two times Ulysses of two.
    context_kind.extend((context >= 4).then(|| "context_kind=both".into()));
    let mut expert = vec![String::new()];
    expert.extend(divisors().map(|expert| format!("expert={expert}")));
    let choices = [
        vec![degree("data", data)],
        vec![degree("tensor", tensor)],
        options(tensor > 1, &["sequence=true"]),
        vec![degree("context", context)],
        context_kind,
        vec![degree("pipe", pipe)],
        options(
            pipe > 1,
            &["schedule=gpipe", "schedule=interleaved", "schedule=zb-h1", "schedule=zb-h2"],
        ),
        expert,
        zero,
        options(true, &["recompute=selective", "recompute=full"]),
    ];
    let mut all = vec![String::new()];
    for options in choices {
        let join = |words: &String, option: &String| format!("{words} {option}").trim().to_string();
        all = all
            .iter()
            .flat_map(|words| options.iter().map(move |option| join(words, option)))
            .collect();
    }
    all
}

/// Each axis with its options.
const AXES: [(&str, &[&str]); 4] = [
    ("data", &["zero", "expert"]),
    ("tensor", &["sequence"]),
    ("context", &["context_kind"]),
    ("pipe", &["schedule"]),
];

/// Indices of each axis at its smallest degree: without options, and with one option at a time.
fn single_axes(allowed: &[String]) -> Vec<usize> {
    let key = |word: &str| word.split('=').next().unwrap_or(word).to_string();
    let mut chosen = Vec::new();
    for (axis, choices) in AXES {
        let mut smallest = None;
        for (index, words) in allowed.iter().enumerate() {
            let words: Vec<&str> = words.split(' ').collect();
            let choice = match words[..] {
                [_] => true,
                [_, choice] => choices.contains(&key(choice).as_str()),
                _ => false,
            };
            if key(words[0]) == axis && choice && *smallest.get_or_insert(words[0]) == words[0] {
                chosen.push(index);
            }
        }
    }
    chosen
}

/// All pairs of words of a layout, including each word with itself.
fn pairs(words: &str) -> Vec<(&str, &str)> {
    let words: Vec<&str> = words.split(' ').collect();
    let with_later = |(at, word)| words[at..].iter().map(move |later| (word, *later));
    words.iter().copied().enumerate().flat_map(with_later).collect()
}
