//! Layouts to try a model on: every axis alone, then products that bring together what no other has yet.
//! Judges nothing itself: what a model allows, `Plan::resolve` says.

use std::collections::HashSet;

use crate::config::Config;
use crate::plan::Plan;
use crate::resolve::Environment;

/// At most `count` layouts of 2 to `ranks` ranks, in the words of `Config::with_layout`, that `config` allows
/// with data of `vocab` tokens: the same list every time.
///
/// First come the axes one at a time, each at its smallest degree and with each of its options; then, as long
/// as there is room, the layout with the most words, and then the most pairs of words, that none before it had.
/// No axis has more than four ranks: what goes wrong there goes wrong with more.
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
    let mut chosen = alone(&allowed);
    chosen.truncate(count);
    let mut seen: HashSet<(&str, &str)> =
        chosen.iter().flat_map(|index| &pairs[*index]).copied().collect();
    while chosen.len() < count {
        let new = |index: &usize| {
            let new = pairs[*index].iter().filter(|pair| !seen.contains(pair));
            let words = new.clone().filter(|(first, second)| first == second).count();
            (words, new.count())
        };
        // Of those with equally many the first, which has the fewest ranks.
        let best = (0..allowed.len()).rev().max_by_key(new);
        let Some(best) = best.filter(|best| new(best).1 > 0) else { break };
        seen.extend(&pairs[best]);
        chosen.push(best);
    }
    chosen.into_iter().map(|index| allowed[index].clone()).collect()
}

/// All that can be, those of few ranks first.
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
            typed(degrees).into_iter().filter(|words| fits(words)).map(|words| (ranks, words)),
        );
    }
    all.sort_by_key(|(ranks, _)| *ranks);
    all.into_iter().map(|(_, words)| words).collect()
}

/// Ranks along data, tensor, context and pipe.
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

/// The degrees with every choice that they leave. What is the default is not typed.
fn typed([data, tensor, context, pipe]: [usize; 4]) -> Vec<String> {
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
    // Fewer ranks than four are a ring or none.
    context_kind.extend((context >= 4).then(|| "context_kind=both".into()));
    let mut expert = vec![String::new()];
    expert.extend(divisors().map(|expert| format!("expert={expert}")));
    let questions = [
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
    for answers in questions {
        let join = |words: &String, answer: &String| format!("{words} {answer}").trim().to_string();
        all = all
            .iter()
            .flat_map(|words| answers.iter().map(move |more| join(words, more)))
            .collect();
    }
    all
}

/// Each axis, and the choices that come with it.
const AXES: [(&str, &[&str]); 4] = [
    ("data", &["zero", "expert"]),
    ("tensor", &["sequence"]),
    ("context", &["context_kind"]),
    ("pipe", &["schedule"]),
];

/// Each axis at its smallest degree, by itself and with each of its choices by itself.
fn alone(allowed: &[String]) -> Vec<usize> {
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

/// Every two words of a layout, and each word with itself.
fn pairs(words: &str) -> Vec<(&str, &str)> {
    let words: Vec<&str> = words.split(' ').collect();
    let with_later = |(at, word)| words[at..].iter().map(move |later| (word, *later));
    words.iter().copied().enumerate().flat_map(with_later).collect()
}
