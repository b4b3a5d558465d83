//! Reads environment variables and collects every error in them. Never touches the process environment: the caller
//! passes a lookup function.

use std::fmt::Display;
use std::str::FromStr;

pub(super) struct Vars<'a> {
    env: &'a dyn Fn(&str) -> Option<String>,
    errors: Vec<String>,
}

impl<'a> Vars<'a> {
    pub fn new(env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Vars { env, errors: Vec::new() }
    }

    /// The trimmed value; `None` when it is unset or blank, since job scripts often export empty variables.
    pub fn text(&self, name: &str) -> Option<String> {
        let value = (self.env)(name)?.trim().to_string();
        (!value.is_empty()).then_some(value)
    }

    pub fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub fn error(&mut self, error: impl Display) {
        self.errors.push(error.to_string());
    }

    /// The value as a `T`. A value that does not parse is recorded as an error and treated as unset.
    pub fn parsed<T: FromStr>(&mut self, name: &str, kind: &str) -> Option<T> {
        let text = self.text(name)?;
        let value = text.parse().ok();
        if value.is_none() {
            self.error(format!("{name}={text:?} is not {kind}; correct or unset it"));
        }
        value
    }

    pub fn number<T: FromStr>(&mut self, name: &str) -> Option<T> {
        self.parsed(name, "an integer in range")
    }

    /// The first of `names` that is set.
    pub fn first_number<T: FromStr>(&mut self, names: &[&str]) -> Option<T> {
        let name = names.iter().find(|name| self.is_set(name))?;
        self.number(name)
    }

    /// A number that must be set because `partner` is.
    pub fn required<T: FromStr>(&mut self, name: &str, partner: &str) -> Option<T> {
        if !self.is_set(name) {
            self.error(format!("{name} is not set although {partner} is; set both or neither"));
        }
        self.number(name)
    }

    /// Two numbers that must be set together; `default` if neither is. `None` where an error was recorded.
    pub fn pair(
        &mut self,
        first: &str,
        second: &str,
        default: (usize, usize),
    ) -> (Option<usize>, Option<usize>) {
        if !self.is_set(first) && !self.is_set(second) {
            return (Some(default.0), Some(default.1));
        }
        (self.required(first, second), self.required(second, first))
    }

    pub fn into_errors(self) -> Vec<String> {
        self.errors
    }
}
