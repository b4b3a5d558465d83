//! One regression tree, in the arrays of XGBoost's documents.

use crate::matrix::{Cuts, Matrix, Storage};

/// A tree. Node 0 is the root; a node without a left child is a leaf.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Tree {
    /// Children; -1 for leaves.
    pub left: Vec<i32>,
    pub right: Vec<i32>,
    /// Parent; `i32::MAX` for the root.
    pub parent: Vec<i32>,
    pub feature: Vec<u32>,
    /// Threshold of a split: smaller values go left. Value of a leaf, including the learning rate.
    pub threshold: Vec<f32>,
    /// Direction of missing values.
    pub default_left: Vec<bool>,
    /// Optimal value of the node without the learning rate.
    pub weight: Vec<f32>,
    /// Gain of the split.
    pub gain: Vec<f32>,
    /// Sum of hessians.
    pub cover: Vec<f32>,
    /// Categories that go right, for splits of categorical features.
    pub categories: Vec<Option<Vec<u32>>>,
}

/// A split of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    pub feature: u32,
    pub threshold: f32,
    pub default_left: bool,
    pub gain: f32,
    pub categories: Option<Vec<u32>>,
}

impl Tree {
    /// A tree with one leaf.
    pub fn new() -> Tree {
        let mut tree = Tree::default();
        tree.push(i32::MAX);
        tree
    }

    fn push(&mut self, parent: i32) -> usize {
        self.left.push(-1);
        self.right.push(-1);
        self.parent.push(parent);
        self.feature.push(0);
        self.threshold.push(0.0);
        self.default_left.push(false);
        self.weight.push(0.0);
        self.gain.push(0.0);
        self.cover.push(0.0);
        self.categories.push(None);
        self.left.len() - 1
    }

    /// Splits a leaf and returns its children.
    pub fn split(&mut self, node: usize, split: Split) -> (usize, usize) {
        let (left, right) = (self.push(node as i32), self.push(node as i32));
        (self.left[node], self.right[node]) = (left as i32, right as i32);
        self.feature[node] = split.feature;
        self.threshold[node] = split.threshold;
        self.default_left[node] = split.default_left;
        self.gain[node] = split.gain;
        self.categories[node] = split.categories;
        (left, right)
    }

    pub fn nodes(&self) -> usize {
        self.left.len()
    }

    pub fn is_leaf(&self, node: usize) -> bool {
        self.left[node] < 0
    }

    pub fn leaves(&self) -> usize {
        self.left.iter().filter(|child| **child < 0).count()
    }

    /// The child that a row goes to. `value` is NaN if it is missing.
    pub fn child(&self, node: usize, value: f32) -> usize {
        let left = match &self.categories[node] {
            _ if value.is_nan() => self.default_left[node],
            // Codes that are not categories go left, as in XGBoost.
            Some(right) => !(value >= 0.0 && right.binary_search(&(value as u32)).is_ok()),
            None => value < self.threshold[node],
        };
        (if left { self.left[node] } else { self.right[node] }) as usize
    }

    /// The leaf of a row whose features `value` returns.
    pub fn leaf(&self, value: impl Fn(usize) -> f32) -> usize {
        let mut node = 0;
        while !self.is_leaf(node) {
            node = self.child(node, value(self.feature[node] as usize));
        }
        node
    }
}

/// A tree with bin numbers instead of thresholds. Its thresholds must be among the cuts.
pub struct BinnedTree<'a> {
    tree: &'a Tree,
    /// Whether each bin goes left, and at the end missing values; empty for leaves.
    tables: Vec<Vec<bool>>,
}

impl<'a> BinnedTree<'a> {
    pub fn new(tree: &'a Tree, cuts: &Cuts) -> BinnedTree<'a> {
        let table = |node: usize| {
            if tree.is_leaf(node) {
                return Vec::new();
            }
            let feature = &cuts.features[tree.feature[node] as usize];
            goes_left(tree, node, feature.bins(), feature.split_bin(tree.threshold[node]))
        };
        BinnedTree { tree, tables: (0..tree.nodes()).map(table).collect() }
    }

    /// The leaf of a row.
    pub fn leaf(&self, matrix: &Matrix, row: usize) -> usize {
        let mut node = 0;
        while !self.tree.is_leaf(node) {
            let feature = self.tree.feature[node] as usize;
            let table = &self.tables[node];
            let left = table[bin_of(matrix, feature, row).min(table.len() - 1)];
            node = (if left { self.tree.left[node] } else { self.tree.right[node] }) as usize;
        }
        node
    }
}

/// Whether each bin of the feature of a split goes left, and at the end missing values.
pub(crate) fn goes_left(tree: &Tree, node: usize, bins: usize, split_bin: i32) -> Vec<bool> {
    let mut table: Vec<bool> = match &tree.categories[node] {
        Some(right) => (0..bins as u32).map(|code| right.binary_search(&code).is_err()).collect(),
        None => (0..bins as i32).map(|bin| bin <= split_bin).collect(),
    };
    table.push(tree.default_left[node]);
    table
}

/// The bin of a row; the number of bins if the value is missing.
fn bin_of(matrix: &Matrix, feature: usize, row: usize) -> usize {
    match matrix.layout.storage[feature] {
        Storage::Bytes => {
            let stride = matrix.byte_features.len();
            matrix.bytes[row * stride + matrix.dense_column(feature)] as usize
        }
        Storage::Words => {
            let stride = matrix.word_features.len();
            matrix.words[row * stride + matrix.dense_column(feature)] as usize
        }
        Storage::Sparse => {
            let range = matrix.entry_starts[row] as usize..matrix.entry_starts[row + 1] as usize;
            let slots = matrix.layout.range(feature);
            let row = &matrix.entries[range];
            let at = row.partition_point(|slot| (*slot as usize) < slots.start);
            match row.get(at).map(|slot| *slot as usize) {
                Some(slot) if slot < slots.end => slot - slots.start,
                _ => slots.len(),
            }
        }
    }
}
