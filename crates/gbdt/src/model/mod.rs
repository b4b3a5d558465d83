//! A trained model: trees, their objective and the features that they use.

mod importance;
mod json;
mod predict;
mod shap;
mod text;
mod tree;
mod ubj;
mod value;

pub use importance::{Importance, importance};
pub use predict::PredictionKind;
pub use text::describe;
pub(crate) use tree::goes_left;
pub use tree::{BinnedTree, Split, Tree};

use std::path::Path;

use crate::error::{Error, Result};
use crate::matrix::Feature;
use crate::params::Objective;

/// Trees and how their sums become predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub objective: Objective,
    /// Outputs per row: the number of classes, else 1.
    pub outputs: usize,
    /// Prediction before the first tree, in the space of the output: one number, or one per output.
    pub base_scores: Vec<f32>,
    pub scale_pos_weight: f32,
    pub features: Vec<Feature>,
    /// Tree t belongs to output t modulo the number of outputs, unless `output_of_tree` says otherwise.
    pub trees: Vec<Tree>,
    pub output_of_tree: Vec<usize>,
    /// Round with the best evaluation, from 0, if training stopped early.
    pub best_round: Option<usize>,
}

/// File format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFormat {
    Json,
    Ubj,
}

impl ModelFormat {
    /// The format of a file name.
    pub fn of(path: &Path) -> Result<ModelFormat> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => Ok(ModelFormat::Json),
            Some("ubj") => Ok(ModelFormat::Ubj),
            _ => Err(Error::file(path, "a model file must end in .json or .ubj")),
        }
    }
}

impl Model {
    /// The margin of an output before the first tree.
    pub fn base_margin(&self, output: usize) -> f32 {
        let score = self.base_scores.get(output).or(self.base_scores.first()).copied();
        let score = f64::from(score.unwrap_or(0.0));
        match self.objective {
            Objective::Logistic => -(1.0 / score - 1.0).ln() as f32,
            Objective::Poisson => score.ln() as f32,
            _ => score as f32,
        }
    }

    /// The margins of `rows` rows before the first tree: `output * rows + row`.
    pub(crate) fn base_margins(&self, rows: usize) -> Vec<f32> {
        (0..self.outputs).flat_map(|k| std::iter::repeat_n(self.base_margin(k), rows)).collect()
    }

    /// Number of boosting rounds.
    pub fn rounds(&self) -> usize {
        self.trees.len() / self.outputs.max(1)
    }

    /// The document as bytes. Equal models give equal bytes.
    pub fn to_bytes(&self, format: ModelFormat) -> Vec<u8> {
        let document = json::document(self);
        match format {
            ModelFormat::Json => value::to_json(&document),
            ModelFormat::Ubj => ubj::write(&document),
        }
    }

    /// Reads a document of this crate or of XGBoost (1.7 and later). UBJ and JSON are told apart by their bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Model> {
        let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
        let second = bytes.get(1).copied().unwrap_or(0);
        let is_json =
            first == Some(&b'{') && (second.is_ascii_whitespace() || matches!(second, b'"' | b'}'));
        let document = if is_json { value::from_json(bytes)? } else { ubj::read(bytes)? };
        json::model(&document)
    }

    pub fn load(path: &Path) -> Result<Model> {
        let bytes = std::fs::read(path).map_err(Error::system("read", path))?;
        Model::from_bytes(&bytes).map_err(|error| Error::file(path, error.to_string()))
    }

    /// Writes the model atomically, in the format of the file name.
    pub fn save(&self, path: &Path) -> Result<()> {
        let bytes = self.to_bytes(ModelFormat::of(path)?);
        Ok(lockstep_ckpt::Disk::default().replace(path, &bytes)?)
    }
}
