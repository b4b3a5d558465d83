use half::bf16;
use lockstep_kernels::reference::adamw as reference;
use lockstep_kernels::{AdamW, Float, OptimizerState};

use crate::check::*;

crate::both_types!(matches_the_reference);

/// Three consecutive steps with gradients of type `G`; the second does not write the copy.
fn matches_the_reference<G: Float>() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| [0, 1, 3].map(|offset| (n, offset))) {
        let p = numbers::<f32>(n, 0);
        let steps = [1, 2, 3].map(|step| AdamW {
            lr: 0.01,
            weight_decay: 0.1,
            step,
            scale: 0.5,
            ..AdamW::default()
        });
        let gradients = steps.map(|settings| numbers::<G>(n, settings.step));
        let (mut rp, mut rm, mut rv) = (to_f64(&p), vec![0.0; n], vec![0.0; n]);
        for (settings, g) in steps.iter().zip(&gradients) {
            for i in 0..n {
                let g = g[i].as_f32() as f64;
                (rp[i], rm[i], rv[i]) = reference::step(settings, rp[i], rm[i], rv[i], g);
            }
        }
        check(&format!("adamw of {n} from {offset}"), 1e-6, [rp, rm, rv], || {
            let mut p = Data::row(offset, &p);
            let [mut m, mut v] = [(); 2].map(|_| Data::row(offset, &vec![0f32; n]));
            let mut copy = Data::row(offset, &vec![bf16::ZERO; n]);
            for (settings, g) in steps.iter().zip(&gradients) {
                let state = OptimizerState {
                    parameters: p.view_mut(),
                    bf16_copy: (settings.step != 2).then(|| copy.view_mut()),
                    first_moment: m.view_mut(),
                    second_moment: v.view_mut(),
                };
                device().adamw(settings, state, Data::row(offset, g).view());
            }
            let rounded: Vec<bf16> = p.read::<f32>().iter().map(|p| bf16::from_f32(*p)).collect();
            assert_eq!(copy.read::<bf16>(), rounded, "the bf16 copy differs from the parameters");
            [p, m, v].map(|x| x.read_f64::<f32>())
        });
    }
}
