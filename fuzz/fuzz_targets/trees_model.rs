//! Arbitrary bytes as an XGBoost model, JSON or UBJ: it is rejected, or it predicts and can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_fuzz::timed;
use lockstep_gbdt::{Model, ModelFormat};

/// Wider models are only read: one row would take most of the time.
const MAX_FEATURES: usize = 1 << 12;

fuzz_target!(|bytes: &[u8]| {
    timed(|| {
        let Ok(model) = Model::from_bytes(bytes) else { return };
        if model.features.len() > MAX_FEATURES || model.outputs > MAX_FEATURES {
            return;
        }
        let row = vec![0.5; model.features.len()];
        assert_eq!(model.predict_row(&row).len(), model.outputs);
        for format in [ModelFormat::Json, ModelFormat::Ubj] {
            assert!(Model::from_bytes(&model.to_bytes(format)).is_ok());
        }
    });
});
