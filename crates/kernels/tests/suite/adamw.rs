use crate::check::*;
use half::bf16;
use lockstep_kernels::AdamW;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::adamw::{self, State};
use lockstep_kernels::cpu::{Cpu, elementwise};
use lockstep_kernels::reference::adamw as reference;

crate::both_types!(matches_the_reference);

/// Three consecutive steps with gradients of type `G`.
fn matches_the_reference<G: Float>() {
    for n in LENGTHS {
        let p = numbers::<f32>(n, 0);
        let (mut rp, mut rm, mut rv) = (to_f64(&p), vec![0.0; n], vec![0.0; n]);
        let steps = (1..4).map(|step| AdamW {
            lr: 0.01,
            weight_decay: 0.1,
            step,
            scale: 0.5,
            ..AdamW::default()
        });
        for numbers_of in steps.clone() {
            let g = to_f64(&numbers::<G>(n, numbers_of.step));
            for i in 0..n {
                (rp[i], rm[i], rv[i]) = reference::step(&numbers_of, rp[i], rm[i], rv[i], g[i]);
            }
        }
        everywhere(&format!("adamw of {n}"), 1e-6, [rp, rm, rv], |cpu| {
            let (mut p, mut m, mut v) = (p.clone(), vec![0.0; n], vec![0.0; n]);
            let mut copy = vec![bf16::ZERO; n];
            for numbers_of in steps.clone() {
                let g = numbers::<G>(n, numbers_of.step);
                let copy = (numbers_of.step != 2).then_some(&mut copy[..]);
                let state = State { p: &mut p, m: &mut m, v: &mut v, bf16_copy: copy };
                adamw::step(cpu, &numbers_of, state, &g);
            }
            let mut rounded = vec![bf16::ZERO; n];
            elementwise::cast(cpu, &p, &mut rounded);
            assert_eq!(copy, rounded, "the bf16 copy differs from the parameters");
            [to_f64(&p), to_f64(&m), to_f64(&v)]
        });
    }
}

/// torch 2.x: AdamW(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01) on p = 1, g = 0.5. By hand:
/// the first step's m̂ / √v̂ is 1, so p = 1 * (1 - 0.001) - 0.1.
#[test]
fn first_step_moves_by_the_learning_rate() {
    let numbers = AdamW { lr: 0.1, ..AdamW::default() };
    let (mut p, mut m, mut v) = ([1.0], [0.0], [0.0]);
    let state = State { p: &mut p, m: &mut m, v: &mut v, bf16_copy: None };
    adamw::step(&Cpu::new(1), &numbers, state, &[0.5f32]);
    close("p, m, v", 1e-7, &[0.899, 0.05, 0.00025], &to_f64(&[p[0], m[0], v[0]]));
}
