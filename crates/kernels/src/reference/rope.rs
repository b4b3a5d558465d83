//! Rotary position embedding of one head: a rotation of the plane for each pair.

/// Rotates the pairs `(x[i], x[i + half])` by `position * theta^(-i / half)`.
pub fn forward(x: &mut [f64], position: f64, theta: f64) {
    rotate(x, |i, half| position * theta.powf(-(i as f64) / half as f64));
}

/// Rotates gradients by the opposite angle.
pub fn backward(x: &mut [f64], position: f64, theta: f64) {
    rotate(x, |i, half| -position * theta.powf(-(i as f64) / half as f64));
}

fn rotate(x: &mut [f64], angle: impl Fn(usize, usize) -> f64) {
    let half = x.len() / 2;
    for i in 0..half {
        let (sin, cos) = angle(i, half).sin_cos();
        let (a, b) = (x[i], x[i + half]);
        x[i] = a * cos - b * sin;
        x[i + half] = b * cos + a * sin;
    }
}
