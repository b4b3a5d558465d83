//! Reads variables and gathers what is wrong with them. Never stops at the first mistake, and never
//! touches the process environment: where values come from is the caller's function.

use std::fmt::Display;
use std::str::FromStr;

pub(super) struct Vars<'a> {
    env: &'a dyn Fn(&str) -> Option<String>,
    mistakes: Vec<String>,
}

impl<'a> Vars<'a> {
    pub fn new(env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Vars { env, mistakes: Vec::new() }
    }

    /// The value, or none when it is unset or blank: job scripts often export empty variables.
    pub fn text(&self, name: &str) -> Option<String> {
        let value = (self.env)(name)?.trim().to_string();
        (!value.is_empty()).then_some(value)
    }

    pub fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub fn complain(&mut self, mistake: impl Display) {
        self.mistakes.push(mistake.to_string());
    }

    /// The value as a `T`; one that does not parse is a mistake and counts as none.
    pub fn parsed<T: FromStr>(&mut self, name: &str, kind: &str) -> Option<T> {
        let text = self.text(name)?;
        let value = text.parse().ok();
        if value.is_none() {
            self.complain(format!("{name}={text:?} is not {kind}; correct or unset it"));
        }
        value
    }

    pub fn number<T: FromStr>(&mut self, name: &str) -> Option<T> {
        self.parsed(name, "a whole number in range")
    }

    /// The first of `names` that is set.
    pub fn first_number<T: FromStr>(&mut self, names: &[&str]) -> Option<T> {
        let name = names.iter().find(|name| self.is_set(name))?;
        self.number(name)
    }

    /// A number that has to be there because `partner` announced its kind of launcher.
    pub fn needed<T: FromStr>(&mut self, name: &str, partner: &str) -> Option<T> {
        if !self.is_set(name) {
            self.complain(format!("{name} is not set although {partner} is; set both or neither"));
        }
        self.number(name)
    }

    /// Two numbers that come together or not at all.
    pub fn pair(&mut self, first: &str, second: &str, neither: (usize, usize)) -> PairRead {
        if !self.is_set(first) && !self.is_set(second) {
            return (Some(neither.0), Some(neither.1));
        }
        (self.needed(first, second), self.needed(second, first))
    }

    pub fn into_mistakes(self) -> Vec<String> {
        self.mistakes
    }
}

/// Both numbers; none where a mistake was noted.
pub(super) type PairRead = (Option<usize>, Option<usize>);
