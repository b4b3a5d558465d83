//! A GPU that has failed: it fell off the bus, or has an uncorrectable error.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Payload of the panic of a call to a GPU that has failed. Nothing that this process does with the GPU can succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLost(String);

impl DeviceLost {
    /// An error of a GPU, with the driver's last report about it if there is one.
    pub fn new(message: String, xid: Option<String>) -> DeviceLost {
        DeviceLost(match xid {
            Some(xid) => format!("{message} (kernel log: {xid})"),
            None => message,
        })
    }
}

impl fmt::Display for DeviceLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Records of the kernel log that are read at most.
const MAX_RECORDS: usize = 1 << 16;

/// The last Xid report about the GPU at a PCI address in the kernel log. None if there is none, or if this process may
/// not read the log.
pub(crate) fn last_xid(address: &str) -> Option<String> {
    const NONBLOCK: i32 = 0o4000;
    let mut log = OpenOptions::new().read(true).custom_flags(NONBLOCK).open("/dev/kmsg").ok()?;
    let (mut record, mut last) = ([0; 8192], None);
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                let line = String::from_utf8_lossy(&record[..length]);
                last = xid_of(&line, address).or(last);
            }
            // A record was overwritten before it was read.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            Err(_) => break,
        }
    }
    last
}

/// The Xid report in a line of the kernel log, if it is about this address:
/// `NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, GPU has fallen off the bus.`
fn xid_of(line: &str, address: &str) -> Option<String> {
    let report = &line[line.find("NVRM: Xid (PCI:")?..];
    let (place, _) = report.strip_prefix("NVRM: Xid (PCI:")?.split_once(')')?;
    // The report names the device without its function.
    let same = address.rsplit_once('.').is_some_and(|(device, _)| device == place.to_lowercase());
    same.then(|| report.trim_start_matches("NVRM: ").lines().next().unwrap_or("").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_of_a_device_are_found() {
        let line = "4,1234,5678,-;NVRM: Xid (PCI:0000:1B:00): 79, pid=12, GPU has fallen off the bus.\n K=V";
        let found = "Xid (PCI:0000:1B:00): 79, pid=12, GPU has fallen off the bus.";
        assert_eq!(xid_of(line, "0000:1b:00.0").as_deref(), Some(found));
        assert_eq!(xid_of(line, "0000:1c:00.0"), None);
        assert_eq!(xid_of("6,1,2,-;usb 1-1: new device", "0000:1b:00.0"), None);
        let lost = DeviceLost::new("GPU 3 (H200): cannot wait".into(), Some(found.into()));
        assert!(lost.to_string().ends_with(
            "(kernel log: Xid (PCI:0000:1B:00): 79, pid=12, GPU has fallen off the bus.)"
        ));
    }

    #[test]
    fn hardware_failures_are_not_errors_of_kernels() {
        use crate::driver::is_hardware_failure;
        assert!([46, 214, 220, 714, 721, 999].into_iter().all(is_hardware_failure));
        // Illegal address and launch failure; out of memory.
        assert!(![700, 719, 2, 0].into_iter().any(is_hardware_failure));
    }
}
