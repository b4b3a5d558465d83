//! Importance of features.

use crate::model::Model;

/// Totals over the splits of one feature.
#[derive(Clone, Debug, PartialEq)]
pub struct Importance {
    pub feature: String,
    /// Number of splits.
    pub count: usize,
    /// Sum of the gains of its splits.
    pub gain: f64,
    /// Sum of the hessians of the nodes that it splits.
    pub cover: f64,
}

/// Importance of the features that are used, by decreasing gain.
pub fn importance(model: &Model) -> Vec<Importance> {
    let empty =
        |name: &String| Importance { feature: name.clone(), count: 0, gain: 0.0, cover: 0.0 };
    let mut all: Vec<Importance> = model.features.iter().map(|f| empty(&f.name)).collect();
    for tree in &model.trees {
        for node in (0..tree.nodes()).filter(|node| !tree.is_leaf(*node)) {
            let feature = &mut all[tree.feature[node] as usize];
            feature.count += 1;
            feature.gain += f64::from(tree.gain[node]);
            feature.cover += f64::from(tree.cover[node]);
        }
    }
    all.retain(|feature| feature.count > 0);
    all.sort_by(|one, other| other.gain.total_cmp(&one.gain));
    all
}
