//! Trees as text.

use std::fmt::Write as _;

use crate::model::{Model, Tree};

/// The nodes of a tree, one per line, indented by depth.
pub fn describe(model: &Model, tree: &Tree) -> String {
    let mut out = String::new();
    let mut open = vec![(0, 0)];
    while let Some((node, depth)) = open.pop() {
        let indent = "  ".repeat(depth);
        let cover = tree.cover[node];
        if tree.is_leaf(node) {
            let _ = writeln!(out, "{indent}{node}: leaf {} (cover {cover})", tree.threshold[node]);
            continue;
        }
        let feature = &model.features[tree.feature[node] as usize];
        let condition = match &tree.categories[node] {
            None => format!("{} < {}", feature.name, tree.threshold[node]),
            Some(right) => {
                let word = |code: &u32| {
                    let words = feature.categories.as_deref().unwrap_or(&[]);
                    words.get(*code as usize).cloned().unwrap_or_else(|| code.to_string())
                };
                let words: Vec<String> = right.iter().map(word).collect();
                format!("{} not in {{{}}}", feature.name, words.join(", "))
            }
        };
        let (left, right) = (tree.left[node], tree.right[node]);
        let missing = if tree.default_left[node] { left } else { right };
        let _ = writeln!(
            out,
            "{indent}{node}: {condition} ? {left} : {right}, missing {missing} (gain {}, cover {cover})",
            tree.gain[node]
        );
        open.push((right as usize, depth + 1));
        open.push((left as usize, depth + 1));
    }
    out
}
