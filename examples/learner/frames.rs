//! Messages on a connection: JSON, then numbers.

use std::io::{Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes a frame: the lengths of both parts, JSON, and numbers.
pub fn send(to: &mut impl Write, message: &impl Serialize, values: &[f32]) -> anyhow::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut frame = Vec::with_capacity(8 + text.len() + 4 * values.len());
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend((values.len() as u32).to_le_bytes());
    frame.extend(text);
    values.iter().for_each(|value| frame.extend(value.to_le_bytes()));
    Ok(to.write_all(&frame)?)
}

pub fn receive<M: DeserializeOwned>(from: &mut impl Read) -> anyhow::Result<(M, Vec<f32>)> {
    let mut length = || -> std::io::Result<usize> {
        let mut bytes = [0; 4];
        from.read_exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    let (text, values) = (length()?, length()?);
    let mut bytes = vec![0; text + 4 * values];
    from.read_exact(&mut bytes)?;
    let (text, values) = bytes.split_at(text);
    let (values, _) = values.as_chunks();
    Ok((serde_json::from_slice(text)?, values.iter().map(|one| f32::from_le_bytes(*one)).collect()))
}
