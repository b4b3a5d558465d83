//! Element by element.

pub fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

pub fn scale(a: &[f64], factor: f64) -> Vec<f64> {
    a.iter().map(|a| a * factor).collect()
}

pub fn add_bias(a: &[f64], bias: &[f64]) -> Vec<f64> {
    a.iter().zip(bias.iter().cycle()).map(|(a, bias)| a + bias).collect()
}
