//! Constant tables on the device, copied there on first use.

use std::collections::HashMap;
use std::sync::Mutex;

use lockstep_cuda::DeviceBuffer;

use super::Cuda;

/// Tables on the device, by their ids.
#[derive(Default)]
pub(crate) struct Uploads(Mutex<HashMap<u64, DeviceBuffer>>);

impl Cuda {
    /// The device address of a table. Tables with the same id have the same contents.
    ///
    /// # Panics
    /// If the GPU has no memory left.
    pub(crate) fn upload_once(&self, id: u64, table: impl FnOnce() -> Vec<f32>) -> u64 {
        let mut uploads = self.uploads.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let upload = || {
            let table = table();
            let buffer = self.buffer(size_of_val(&table[..]), "a constant table");
            let buffer = buffer.unwrap_or_else(|error| panic!("{error}"));
            let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_ne_bytes()).collect();
            self.write(buffer.address, &bytes);
            buffer
        };
        uploads.entry(id).or_insert_with(upload).address
    }
}
