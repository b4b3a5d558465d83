//! A model as XGBoost's document, and back. Versions 1.7 to 3.x of XGBoost load it.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::matrix::Feature;
use crate::model::value::{Value, object, text};
use crate::model::{Model, Tree};
use crate::params::Objective;

/// The version of XGBoost whose format is written; later ones read it as well.
const VERSION: [i64; 3] = [1, 7, 6];

/// Attribute with the words of categorical features.
const CATEGORIES: &str = "lockstep_categories";

pub(crate) fn document(model: &Model) -> Value {
    let classes = if model.objective == Objective::Softmax { model.outputs } else { 0 };
    let trees = model.trees.iter().enumerate().map(|(id, tree)| tree_document(id, tree, model));
    // Default names are left out: XGBoost would insist on them.
    let named =
        model.features.iter().enumerate().any(|(i, feature)| feature.name != format!("f{i}"));
    let names = model.features.iter().filter(|_| named).map(|feature| text(&feature.name));
    let has_categories = model.features.iter().any(|feature| feature.categories.is_some());
    let kinds = model.features.iter().filter(|_| named || has_categories);
    let kinds = kinds.map(|feature| text(if feature.categories.is_some() { "c" } else { "float" }));
    let booster = object(vec![
        (
            "model",
            object(vec![
                (
                    "gbtree_model_param",
                    object(vec![
                        ("num_parallel_tree", text(1)),
                        ("num_trees", text(model.trees.len())),
                        ("size_leaf_vector", text(0)),
                    ]),
                ),
                (
                    "tree_info",
                    Value::List(
                        model.output_of_tree.iter().map(|k| Value::Int(*k as i64)).collect(),
                    ),
                ),
                ("trees", Value::List(trees.collect())),
            ]),
        ),
        ("name", text("gbtree")),
    ]);
    object(vec![
        (
            "learner",
            object(vec![
                ("attributes", attributes(model)),
                ("feature_names", Value::List(names.collect())),
                ("feature_types", Value::List(kinds.collect())),
                ("gradient_booster", booster),
                (
                    "learner_model_param",
                    object(vec![
                        ("base_score", base_score_text(&model.base_scores)),
                        ("boost_from_average", text(1)),
                        ("num_class", text(classes)),
                        ("num_feature", text(model.features.len())),
                        ("num_target", text(1)),
                    ]),
                ),
                ("objective", objective(model)),
            ]),
        ),
        ("version", Value::List(VERSION.map(Value::Int).to_vec())),
    ])
}

/// A number that all versions read, or a list for several numbers, which need version 3.1.
fn base_score_text(scores: &[f32]) -> Value {
    let number = |score: &f32| format!("{score:e}").to_uppercase();
    match scores {
        [one] => text(number(one)),
        many => text(format!("[{}]", many.iter().map(number).collect::<Vec<_>>().join(","))),
    }
}

fn attributes(model: &Model) -> Value {
    let mut fields = Vec::new();
    if let Some(round) = model.best_round {
        fields.push(("best_iteration", text(round)));
    }
    let words: BTreeMap<&str, &Vec<String>> = model
        .features
        .iter()
        .filter_map(|feature| Some((feature.name.as_str(), feature.categories.as_ref()?)))
        .collect();
    if !words.is_empty() {
        fields.push((CATEGORIES, text(serde_json::to_string(&words).expect("plain data"))));
    }
    object(fields)
}

fn objective(model: &Model) -> Value {
    let name = ("name", text(model.objective.xgboost_name()));
    let scale = object(vec![("scale_pos_weight", text(model.scale_pos_weight))]);
    match model.objective {
        Objective::SquaredError | Objective::Logistic => {
            object(vec![name, ("reg_loss_param", scale)])
        }
        Objective::Softmax => {
            let classes = object(vec![("num_class", text(model.outputs))]);
            object(vec![name, ("softmax_multiclass_param", classes)])
        }
        Objective::Poisson => {
            let step = object(vec![("max_delta_step", text("0.7"))]);
            object(vec![name, ("poisson_regression_param", step)])
        }
        Objective::Quantile => {
            let alpha = object(vec![("quantile_alpha", text("0.5"))]);
            object(vec![name, ("quantile_loss_param", alpha)])
        }
        Objective::Rank => {
            let param = object(vec![
                ("lambdarank_num_pair_per_sample", text(1)),
                ("num_pairsample", text(1)),
                ("fix_list_weight", text(0)),
            ]);
            let fields =
                vec![name, ("lambda_rank_param", param.clone()), ("lambdarank_param", param)];
            object(fields)
        }
        Objective::AbsoluteError => object(vec![name]),
    }
}

fn tree_document(id: usize, tree: &Tree, model: &Model) -> Value {
    let (mut codes, mut nodes, mut segments, mut sizes) = (vec![], vec![], vec![], vec![]);
    for (node, set) in tree.categories.iter().enumerate() {
        if let Some(set) = set {
            nodes.push(node as i32);
            segments.push(codes.len() as i64);
            sizes.push(set.len() as i64);
            codes.extend(set.iter().map(|code| *code as i32));
        }
    }
    let flags = |flag: &dyn Fn(usize) -> bool| {
        Value::U8((0..tree.nodes()).map(|node| u8::from(flag(node))).collect())
    };
    object(vec![
        ("base_weights", Value::F32(tree.weight.clone())),
        ("categories", Value::I32(codes)),
        ("categories_nodes", Value::I32(nodes)),
        ("categories_segments", Value::I64(segments)),
        ("categories_sizes", Value::I64(sizes)),
        ("default_left", flags(&|node| tree.default_left[node])),
        ("id", Value::Int(id as i64)),
        ("left_children", Value::I32(tree.left.clone())),
        ("loss_changes", Value::F32(tree.gain.clone())),
        ("parents", Value::I32(tree.parent.clone())),
        ("right_children", Value::I32(tree.right.clone())),
        ("split_conditions", Value::F32(tree.threshold.clone())),
        ("split_indices", Value::I32(tree.feature.iter().map(|feature| *feature as i32).collect())),
        ("split_type", flags(&|node| tree.categories[node].is_some())),
        ("sum_hessian", Value::F32(tree.cover.clone())),
        (
            "tree_param",
            object(vec![
                ("num_deleted", text(0)),
                ("num_feature", text(model.features.len())),
                ("num_nodes", text(tree.nodes())),
                ("size_leaf_vector", text(0)),
            ]),
        ),
    ])
}

/// Largest numbers that are accepted from a document. A document with more features names them.
const MAX_UNNAMED: usize = 1 << 20;
const MAX_OUTPUTS: usize = 1 << 20;

pub(crate) fn model(document: &Value) -> Result<Model> {
    let learner = document.at("learner")?;
    let name = learner.at("objective.name")?.as_text().unwrap_or_default();
    let objective = Objective::from_xgboost(name)
        .ok_or_else(|| Error::Model(format!("objective {name:?} is not supported")))?;
    let booster = learner.at("gradient_booster.name")?.as_text().unwrap_or_default();
    if booster != "gbtree" {
        return Err(Error::Model(format!("booster {booster:?} is not supported, only gbtree")));
    }
    let param = learner.at("learner_model_param")?;
    let number = |key: &str| param.get(key).and_then(Value::as_number).unwrap_or(0.0);
    let limit = |what: &str, value: f64, most: usize| match value {
        value if value >= 0.0 && value <= most as f64 => Ok(value as usize),
        value => Err(Error::Model(format!("{what} is {value}, at most {most} is supported"))),
    };
    let classes = limit("num_class", number("num_class"), MAX_OUTPUTS)?;
    if number("num_target") > 1.0 {
        return Err(Error::Model("models with several targets are not supported".into()));
    }
    let outputs = classes.max(1);
    let named = learner.get("feature_names").and_then(Value::items).map_or(0, <[Value]>::len);
    let features = limit("num_feature", number("num_feature"), named.max(MAX_UNNAMED))?;
    let scale =
        learner.get("objective").and_then(|o| o.get("reg_loss_param")?.get("scale_pos_weight"));
    let attributes = learner.get("attributes");
    let best = attributes.and_then(|a| a.get("best_iteration")?.as_number());
    let trees = learner.at("gradient_booster.model.trees")?;
    let trees = trees.items().ok_or_else(|| Error::Model("trees is not a list".into()))?;
    let read = |(index, tree): (usize, &Value)| {
        read_tree(tree, features).map_err(|error| Error::Model(format!("tree {index}: {error}")))
    };
    let trees: Vec<Tree> = trees.iter().enumerate().map(read).collect::<Result<_>>()?;
    let info = learner.at("gradient_booster.model.tree_info")?.numbers().unwrap_or_default();
    let output_of_tree: Vec<usize> = info.iter().map(|output| *output as usize).collect();
    if output_of_tree.len() != trees.len() || output_of_tree.iter().any(|output| *output >= outputs)
    {
        return Err(Error::Model("tree_info does not fit the trees and classes".into()));
    }
    Ok(Model {
        objective,
        outputs,
        base_scores: base_scores(param, outputs)?,
        scale_pos_weight: scale.and_then(Value::as_number).unwrap_or(1.0) as f32,
        features: read_features(learner, features)?,
        trees,
        output_of_tree,
        best_round: best.filter(|round| *round >= 0.0).map(|round| round as usize),
    })
}

/// The base scores: a number, or since version 3.1 a list such as `[5E-1]`.
fn base_scores(param: &Value, outputs: usize) -> Result<Vec<f32>> {
    let value = param
        .get("base_score")
        .ok_or_else(|| Error::Model("the model has no base_score".into()))?;
    let wrong = || Error::Model("base_score is not a number".into());
    let number = |text: &str| text.trim().parse::<f32>().ok().filter(|score| score.is_finite());
    let scores: Vec<f32> = match value.as_text() {
        Some(list) => {
            let list = list.trim().trim_start_matches('[').trim_end_matches(']');
            list.split(',').map(number).collect::<Option<_>>().ok_or_else(wrong)?
        }
        None => vec![value.as_number().filter(|score| score.is_finite()).ok_or_else(wrong)? as f32],
    };
    match scores.len() {
        1 => Ok(scores),
        count if count == outputs => Ok(scores),
        count => Err(Error::Model(format!("{count} base scores for {outputs} outputs"))),
    }
}

fn read_features(learner: &Value, count: usize) -> Result<Vec<Feature>> {
    let texts = |key: &str| -> Vec<String> {
        let items = learner.get(key).and_then(Value::items).unwrap_or(&[]);
        items.iter().filter_map(|item| item.as_text().map(str::to_string)).collect()
    };
    let (names, kinds) = (texts("feature_names"), texts("feature_types"));
    let words = learner.get("attributes").and_then(|a| a.get(CATEGORIES)?.as_text());
    let mut words: BTreeMap<String, Vec<String>> = match words {
        None => BTreeMap::new(),
        Some(words) => serde_json::from_str(words)
            .map_err(|error| Error::Model(format!("attribute {CATEGORIES}: {error}")))?,
    };
    let feature = |index: usize| {
        let name = names.get(index).cloned().unwrap_or_else(|| format!("f{index}"));
        let is_category = kinds.get(index).is_some_and(|kind| kind == "c");
        let categories = words.remove(&name).or(is_category.then(Vec::new));
        Feature { name, categories }
    };
    Ok((0..count).map(feature).collect())
}

fn read_tree(document: &Value, features: usize) -> Result<Tree> {
    let numbers = |key: &str| -> Result<Vec<f64>> {
        document
            .at(key)?
            .numbers()
            .ok_or_else(|| Error::Model(format!("{key} is not a list of numbers")))
    };
    let floats = |key: &str| -> Result<Vec<f32>> {
        Ok(numbers(key)?.into_iter().map(|value| value as f32).collect())
    };
    let integers = |key: &str| -> Result<Vec<i32>> {
        Ok(numbers(key)?.into_iter().map(|value| value as i32).collect())
    };
    if document
        .get("tree_param")
        .and_then(|p| p.get("size_leaf_vector")?.as_number())
        .is_some_and(|size| size > 1.0)
    {
        return Err(Error::Model("leaves with several values are not supported".into()));
    }
    let left = integers("left_children")?;
    let nodes = left.len();
    let mut tree = Tree {
        right: integers("right_children")?,
        parent: vec![i32::MAX; nodes],
        feature: integers("split_indices")?.into_iter().map(|feature| feature as u32).collect(),
        threshold: floats("split_conditions")?,
        default_left: numbers("default_left")?.into_iter().map(|flag| flag != 0.0).collect(),
        weight: floats("base_weights")?,
        gain: floats("loss_changes")?,
        cover: floats("sum_hessian")?,
        categories: vec![None; nodes],
        left,
    };
    let lengths = [
        tree.right.len(),
        tree.feature.len(),
        tree.threshold.len(),
        tree.default_left.len(),
        tree.weight.len(),
        tree.gain.len(),
        tree.cover.len(),
    ];
    if nodes == 0 || lengths.iter().any(|len| *len != nodes) {
        return Err(Error::Model(format!(
            "its arrays have different lengths: {nodes}, {lengths:?}"
        )));
    }
    read_categories(document, &mut tree)?;
    check(&mut tree, features)?;
    Ok(tree)
}

fn read_categories(document: &Value, tree: &mut Tree) -> Result<()> {
    let list = |key: &str| document.get(key).and_then(Value::numbers).unwrap_or_default();
    let (codes, nodes) = (list("categories"), list("categories_nodes"));
    let (segments, sizes) = (list("categories_segments"), list("categories_sizes"));
    let wrong = || Error::Model("its categories are invalid".into());
    if nodes.len() != segments.len() || nodes.len() != sizes.len() {
        return Err(wrong());
    }
    for ((node, start), size) in nodes.iter().zip(segments).zip(sizes) {
        let (node, start, size) = (*node as usize, start as usize, size as usize);
        let end = start.checked_add(size).ok_or_else(wrong)?;
        let set = codes.get(start..end).ok_or_else(wrong)?;
        let mut set: Vec<u32> = set.iter().map(|code| *code as u32).collect();
        set.sort_unstable();
        *tree.categories.get_mut(node).ok_or_else(wrong)? = Some(set);
    }
    Ok(())
}

/// Checks that the nodes form a tree, and sets the parents.
fn check(tree: &mut Tree, features: usize) -> Result<()> {
    let nodes = tree.nodes();
    let mut seen = vec![false; nodes];
    let mut open = vec![0];
    while let Some(node) = open.pop() {
        if std::mem::replace(&mut seen[node], true) {
            return Err(Error::Model(format!("node {node} has two parents")));
        }
        if tree.threshold[node].is_nan() {
            return Err(Error::Model(format!("the value of node {node} is not a number")));
        }
        let (left, right) = (tree.left[node], tree.right[node]);
        if left < 0 && right < 0 {
            (tree.left[node], tree.right[node]) = (-1, -1);
            continue;
        }
        for child in [left, right] {
            let child = usize::try_from(child).ok().filter(|child| *child < nodes && *child != 0);
            let child =
                child.ok_or_else(|| Error::Model(format!("node {node} has an invalid child")))?;
            tree.parent[child] = node as i32;
            open.push(child);
        }
        if tree.feature[node] as usize >= features {
            let what = format!("node {node} uses feature {} of {features}", tree.feature[node]);
            return Err(Error::Model(what));
        }
    }
    // Nodes that were pruned away must not look like splits.
    for (node, seen) in seen.into_iter().enumerate() {
        if !seen {
            (tree.left[node], tree.right[node]) = (-1, -1);
        }
    }
    Ok(())
}
