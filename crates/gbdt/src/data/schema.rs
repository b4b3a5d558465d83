//! The role of each column of a file.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Names of the columns that are not numeric features.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schema {
    /// Column of the labels. Default: `label` if there is such a column, else the first one.
    pub label: Option<String>,
    /// Column of the row weights.
    pub weight: Option<String>,
    /// Column of the groups (queries) of a ranking.
    pub group: Option<String>,
    /// Columns whose values are categories.
    pub categorical: Vec<String>,
    /// Columns that are not used.
    pub ignore: Vec<String>,
    /// Whether CSV files have a line of names. Default: true.
    pub header: Option<bool>,
    /// Separator of CSV fields. Default: a comma; a tab in `.tsv` files.
    pub separator: Option<char>,
    /// Number of features of LibSVM files. Default: the largest index + 1. Required for more than 2²⁰ features.
    pub features: Option<usize>,
}

/// The role of one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Feature(usize),
    Category(usize),
    Label,
    Weight,
    Group,
    Ignored,
}

/// Columns of a file and their roles.
#[derive(Debug, PartialEq)]
pub(crate) struct Roles {
    pub roles: Vec<Role>,
    /// Names of the features.
    pub features: Vec<String>,
}

impl Schema {
    /// Assigns roles to columns. `labeled` requires a label. Errors are (column from 0, text).
    pub(crate) fn assign(&self, names: &[String], labeled: bool) -> Result<Roles, (usize, String)> {
        let mut seen = HashMap::new();
        for (column, name) in names.iter().enumerate() {
            if let Some(first) = seen.insert(name, column) {
                let what = format!(
                    "the name {name:?} is used by columns {} and {}; rename one of them",
                    first + 1,
                    column + 1
                );
                return Err((column, what));
            }
        }
        let find = |what: &str, name: &String| {
            names.iter().position(|other| other == name).ok_or_else(|| {
                let known = names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
                (0, format!("there is no column {name:?} ({what}); the columns are {known}"))
            })
        };
        let mut roles = vec![None; names.len()];
        let mut set = |column: usize, role: Role| match roles[column].replace(role) {
            None => Ok(()),
            Some(_) => Err((column, format!("column {:?} has two roles", names[column]))),
        };
        match &self.label {
            Some(name) if labeled || names.contains(name) => {
                set(find("data.label", name)?, Role::Label)?
            }
            Some(_) => {}
            None => match names.iter().position(|name| name == "label") {
                Some(column) => set(column, Role::Label)?,
                None if labeled && !names.is_empty() => set(0, Role::Label)?,
                None => {}
            },
        }
        for (what, name, role) in
            [("data.weight", &self.weight, Role::Weight), ("data.group", &self.group, Role::Group)]
        {
            if let Some(name) = name.as_ref().filter(|name| labeled || names.contains(name)) {
                set(find(what, name)?, role)?;
            }
        }
        for name in &self.ignore {
            set(find("data.ignore", name)?, Role::Ignored)?;
        }
        for name in &self.categorical {
            let column = find("data.categorical", name)?;
            if roles[column].is_some() {
                return Err((column, format!("column {name:?} has two roles")));
            }
        }
        let mut features = Vec::new();
        let roles = names.iter().zip(roles).map(|(name, role)| {
            role.unwrap_or_else(|| {
                features.push(name.clone());
                match self.categorical.contains(name) {
                    true => Role::Category(features.len() - 1),
                    false => Role::Feature(features.len() - 1),
                }
            })
        });
        Ok(Roles { roles: roles.collect(), features })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &str) -> Vec<String> {
        names.split(' ').map(str::to_string).collect()
    }

    #[test]
    fn roles_by_name() {
        let schema = Schema {
            weight: Some("w".into()),
            categorical: vec!["city".into()],
            ignore: vec!["id".into()],
            ..Schema::default()
        };
        let roles = schema.assign(&names("id a label city w"), true).unwrap();
        assert_eq!(roles.features, ["a", "city"]);
        use Role::*;
        assert_eq!(roles.roles, [Ignored, Feature(0), Label, Category(1), Weight]);
    }

    #[test]
    fn errors_suggest_a_fix() {
        let error =
            |schema: &Schema, columns: &str| schema.assign(&names(columns), true).unwrap_err();
        let (column, text) = error(&Schema::default(), "label a b a");
        assert_eq!(column, 3);
        assert_eq!(text, "the name \"a\" is used by columns 2 and 4; rename one of them");
        let missing = Schema { label: Some("y".into()), ..Schema::default() };
        assert!(error(&missing, "a b").1.contains("the columns are a, b"));
    }
}
