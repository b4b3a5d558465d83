//! Calibration recovers a synthetic machine and rejects implausible measurements.

use crate::tables::plan;
use lockstep_plan::model::Family;
use lockstep_plan::{Config, Dtype, Plan};
use lockstep_sim::{
    AttentionRate, Cluster, Curve, Efficiency, GpuMeasurement, MatmulCall, MatmulOverhead,
    MatmulOverheads, MeasuredAttention, MeasuredMatmul, MeasuredStep, OpClass, OpCurves, Options,
    RankSkew, estimate, fit, fit_gpu, matmul,
};

/// Two cores shared by four ranks, with arbitrary efficiencies.
fn made_up(ranks: usize) -> Cluster {
    let mut cluster = Cluster::built_in("cpu").unwrap();
    (cluster.per_host, cluster.ranks) = (ranks, Some(ranks));
    if ranks > 1 {
        // A constant per step, which matters less for long steps.
        cluster.skew = Curve(vec![(1.0, 0.07), (100.0, 0.007)]);
    }
    cluster.links[0].bandwidth_gbs = 2.5;
    cluster.links[0].hop_us = 40.0;
    let device = &mut cluster.accelerator;
    (device.bandwidth_gbs, device.stream) = (12.0, 1.0);
    (device.peak.f32, device.peak.bf16) = (0.25, 1.1);
    (device.launch_us, device.kernel_gap_us) = (0.0, 4.0);
    let shape = &mut device.matmul;
    (shape.best, shape.accumulate, shape.ramp) = (1.0, 1.0, 0.0);
    shape.curve.clear();
    let part = MatmulOverhead { best: 1.0, accumulate: 0.9, start_us: 3.0, passes: Some(5.0) };
    shape.overheads = Some(MatmulOverheads {
        f32: part,
        bf16: MatmulOverhead { accumulate: 0.7, ..part },
        tf32: None,
    });
    let mut efficiency = Efficiency::default();
    for compute in [Dtype::F32, Dtype::Bf16] {
        for family in [Family::Gpt2, Family::Llama] {
            *efficiency.of_mut(compute, family) = curves();
        }
    }
    device.efficiency = Some(efficiency);
    cluster
}

fn curves() -> OpCurves {
    let mut curves = OpCurves::default();
    for (number, kind) in OpClass::ALL.into_iter().enumerate() {
        let reached = 0.4 + 0.05 * number as f64;
        let curve = curves.of_mut(kind);
        curve.add(1e2, reached);
        curve.add(1e8, 0.5 * reached);
    }
    curves
}

fn model(family: &str, dim: usize, compute: &str, ranks: usize) -> Plan {
    let text = format!(
        "[model]\nfamily = \"{family}\"\ndim = {dim}\nlayers = 3\nheads = {}\nseq = 128\nvocab = {}\n\
         [train]\nmicro_batch = 4\nglobal_batch = {}\n[layout]\ndata = {ranks}\n[precision]\ncompute = \"{compute}\"\n",
        dim / 32,
        8 * dim,
        4 * ranks
    );
    plan(&text, ranks)
}

/// Simulated measurements of the machine.
fn steps(cluster: &Cluster, ranks: usize) -> Vec<MeasuredStep> {
    let mut steps = Vec::new();
    for dim in [96, 256, 640] {
        for family in ["gpt2", "llama"] {
            for compute in ["f32", "bf16"] {
                let plan = model(family, dim, compute, ranks);
                let estimate = estimate(&plan, cluster, &Options::default());
                let mut by = [0.0; OpClass::ALL.len()];
                estimate.computing.iter().for_each(|(kind, seconds)| by[*kind as usize] = *seconds);
                let (comm, waiting, rest) =
                    (estimate.time.data, estimate.time.straggling, estimate.time.host);
                steps.push(MeasuredStep { plan, step: estimate.step_s, by, comm, waiting, rest });
            }
        }
    }
    steps
}

fn matmuls(cluster: &Cluster, ranks: usize) -> Vec<MeasuredMatmul> {
    let mut all = Vec::new();
    let mut device = cluster.accelerator.clone();
    // Share of the two cores that a rank gets.
    device.bandwidth_gbs /= ranks as f64;
    let share = 1.0 / ranks as f64;
    for dims in [[512, 64, 192], [1024, 128, 128], [512, 512, 512], [256, 2048, 512]] {
        for sums in [false, true] {
            for (compute, peak) in [(Dtype::F32, device.peak.f32), (Dtype::Bf16, device.peak.bf16)]
            {
                let rate = 1e12 * peak * share;
                let width = compute.bytes() as f64;
                let seconds = matmul(
                    &device,
                    &MatmulCall { dims: dims.map(|dim| dim as f64), count: 1.0, width, rate, sums },
                );
                all.push(MeasuredMatmul { dims, compute, sums, seconds });
            }
        }
    }
    all
}

#[test]
fn a_synthetic_machine_is_recovered() {
    for ranks in [1, 2, 4] {
        let machine = made_up(ranks);
        let mut unknown = Cluster::built_in("cpu").unwrap();
        (unknown.per_host, unknown.ranks) = (ranks, Some(ranks));
        (unknown.accelerator.bandwidth_gbs, unknown.accelerator.stream) = (12.0, 1.0);
        let steps = steps(&machine, ranks);
        let long = RankSkew { computing: 100.0, waiting: 0.7 };
        let found = fit(&unknown, &matmuls(&machine, ranks), &steps, long).unwrap();
        assert!(found.matmul_error < 1e-6, "{}", found.matmul_error);
        for (step, (with, _)) in steps.iter().zip(&found.steps) {
            assert!((with - 1.0).abs() < 0.02, "{ranks} ranks, {:?}: {with}", step.plan.model);
        }
        if ranks > 1 {
            let skew = |seconds: f64| found.cluster.skew.at(seconds).unwrap();
            assert!((skew(0.1) / 0.07 - 1.0).abs() < 0.02, "{ranks} ranks: {}", skew(0.1));
            assert!((skew(1e3) / 0.007 - 1.0).abs() < 1e-6, "{ranks} ranks: {}", skew(1e3));
        }
        // Models between the measured ones.
        for (family, dim, compute) in
            [("gpt2", 512, "f32"), ("llama", 128, "f32"), ("llama", 384, "bf16")]
        {
            let plan = model(family, dim, compute, ranks);
            let step = |cluster: &Cluster| estimate(&plan, cluster, &Options::default()).step_s;
            let off = step(&found.cluster) / step(&machine) - 1.0;
            assert!(off.abs() < 0.03, "{ranks} ranks, {family} of {dim} in {compute}: {off}");
        }
    }
}

#[test]
fn shared_classes_have_one_efficiency() {
    let machine = made_up(1);
    let mut disturbed = steps(&machine, 1);
    for spent in &mut disturbed {
        let factor = if spent.plan.model.family == Family::Gpt2 { 1.25 } else { 0.8 };
        spent.by[OpClass::Matmul as usize] *= factor;
    }
    let found = fit(&machine, &matmuls(&machine, 1), &disturbed, RankSkew::default()).unwrap();
    for family in ["gpt2", "llama"] {
        let plan = model(family, 384, "f32", 1);
        let step = |cluster: &Cluster| estimate(&plan, cluster, &Options::default()).step_s;
        let off = step(&found.cluster) / step(&machine) - 1.0;
        assert!(off.abs() < 0.03, "{family}: {off}");
    }
}

/// A clock that stood still once gave 10,000 GB/s.
#[test]
fn implausible_measurements_are_rejected() {
    let machine = made_up(1);
    let (matmuls, steps) = (matmuls(&machine, 1), steps(&machine, 1));
    let mut faster = steps.clone();
    faster[3].by[OpClass::Norm as usize] *= 1e-4;
    faster[3].step *= 0.1;
    let why = fit(&machine, &matmuls, &faster, RankSkew::default()).unwrap_err();
    assert!(why.starts_with("norm of ") && why.contains("expected a value between"), "{why}");
    let mut still = matmuls.clone();
    still.iter_mut().for_each(|multiply| multiply.seconds = 1e-12);
    let why = fit(&machine, &still, &steps, RankSkew::default()).unwrap_err();
    assert!(why.contains("FLOP/s of matmuls"), "{why}");
    assert!(fit(&machine, &matmuls, &[], RankSkew::default()).is_err());
}

/// A GPU with arbitrary rates.
fn made_up_gpu() -> Cluster {
    let mut cluster = Cluster::built_in("h200").unwrap();
    cluster.links.truncate(1);
    cluster.links[0].span = None;
    let device = &mut cluster.accelerator;
    (device.stream, device.kernel_us, device.launch_us) = (0.8, 2.0, 1.0);
    device.short_kernel_us = Curve(vec![(1024.0, 4.0), (4096.0, 9.0)]);
    device.step_us = 300.0;
    (device.peak.tf32, device.host_gbs) = (Some(494.5), Some([50.0, 40.0]));
    let shape = &mut device.matmul;
    (shape.units, shape.tiles) = (1, vec![(1, 1, 1.0)]);
    (shape.best, shape.accumulate, shape.ramp) = (1.0, 1.0, 0.0);
    let part = MatmulOverhead { best: 0.7, accumulate: 0.9, start_us: 3.0, passes: Some(2.0) };
    shape.overheads = Some(MatmulOverheads {
        f32: MatmulOverhead { best: 0.8, ..part },
        bf16: part,
        tf32: Some(MatmulOverhead { best: 0.6, ..part }),
    });
    for (head_dim, reached) in [(64, 0.3), (128, 0.5)] {
        for seq in [512, 4096] {
            let rate = AttentionRate {
                head_dim,
                seq,
                reached: [reached, 0.8 * reached],
                nondeterministic: Some(0.9 * reached),
            };
            device.attention_rates.bf16.push(rate);
            device.attention_rates.f32.push(rate);
        }
    }
    let mut efficiency = Efficiency::default();
    for compute in [Dtype::F32, Dtype::Bf16] {
        for family in [Family::Gpt2, Family::Llama, Family::Moe] {
            *efficiency.of_mut(compute, family) = curves();
        }
    }
    device.efficiency = Some(efficiency);
    cluster
}

/// A step of the made-up GPU.
fn gpu_step(gpu: &Cluster, family: &str, compute: &str, sizes: [usize; 2]) -> MeasuredStep {
    let [dim, layers] = sizes;
    let experts = if family == "moe" { "experts = 8\ntop_k = 2\n" } else { "" };
    let text = format!(
        "[model]\nfamily = \"{family}\"\ndim = {dim}\nlayers = {layers}\nheads = {}\nseq = 1024\nvocab = 32768\n{experts}\
         [train]\nmicro_batch = 8\nglobal_batch = 8\n[device]\nkind = \"cuda\"\n[precision]\ncompute = \"{compute}\"\n",
        dim / 64
    );
    measured_step(gpu, &text)
}

/// A step of short kernels.
fn small_step(gpu: &Cluster, [layers, batch]: [usize; 2]) -> MeasuredStep {
    let text = format!(
        "[model]\nfamily = \"gpt2\"\ndim = 128\nlayers = {layers}\nheads = 4\nseq = 128\nvocab = 512\n\
         [train]\nmicro_batch = {batch}\nglobal_batch = {batch}\n[device]\nkind = \"cuda\"\n[precision]\ncompute = \"bf16\"\n"
    );
    measured_step(gpu, &text)
}

fn measured_step(gpu: &Cluster, text: &str) -> MeasuredStep {
    let plan = gpu_plan(text);
    let found = estimate(&plan, gpu, &Options::default());
    let mut by = [0.0; OpClass::ALL.len()];
    found.computing.iter().for_each(|(kind, seconds)| by[*kind as usize] = *seconds);
    MeasuredStep { plan, step: found.step_s, by, comm: 0.0, waiting: 0.0, rest: 0.0 }
}

fn gpu_plan(text: &str) -> Plan {
    let environment = Cluster::built_in("h200").unwrap().environment(1, None);
    Plan::resolve(&Config::parse(text, &[]), &environment).unwrap()
}

#[test]
fn a_synthetic_gpu_is_recovered() {
    let gpu = made_up_gpu();
    let device = &gpu.accelerator;
    let multiply = |compute: Dtype, tf32: bool| {
        let mut device = device.clone();
        let peak = match (compute, tf32) {
            (Dtype::Bf16, _) => device.peak.bf16,
            (_, true) => 494.5,
            _ => device.peak.f32,
        };
        let overheads = device.matmul.overheads.as_mut().unwrap();
        if tf32 {
            overheads.f32 = overheads.tf32.unwrap();
        }
        let mut all = Vec::new();
        for dims in [[8192, 512, 2048], [1024, 256, 768], [16384, 2048, 2048], [4096, 4096, 512]] {
            for sums in [false, true] {
                let width = compute.bytes() as f64;
                let (count, rate) = (1.0, 1e12 * peak);
                let call =
                    MatmulCall { dims: dims.map(|dim| dim as f64), count, width, rate, sums };
                all.push(MeasuredMatmul { dims, compute, sums, seconds: matmul(&device, &call) });
            }
        }
        all
    };
    let mut attention = Vec::new();
    for (compute, peak) in [(Dtype::F32, device.peak.f32), (Dtype::Bf16, device.peak.bf16)] {
        for rate in &device.attention_rates.bf16 {
            let AttentionRate { head_dim, seq, reached, nondeterministic } = *rate;
            let mut one = MeasuredAttention {
                compute,
                rows: 64,
                head_dim,
                seq,
                seconds: [1.0, 1.0],
                nondeterministic: 1.0,
            };
            let flops = one.flops();
            one.seconds = std::array::from_fn(|pass| flops[pass] / (reached[pass] * 1e12 * peak));
            one.nondeterministic = flops[1] / (nondeterministic.unwrap() * 1e12 * peak);
            attention.push(one);
        }
    }
    let mut steps = Vec::new();
    for family in ["gpt2", "llama", "moe"] {
        for sizes in [[640, 4], [1536, 3], [2560, 2]] {
            steps.push(gpu_step(&gpu, family, "bf16", sizes));
        }
        steps.push(gpu_step(&gpu, family, "f32", [1024, 2]));
    }
    let [f32, bf16, tf32] = [(Dtype::F32, false), (Dtype::Bf16, false), (Dtype::F32, true)]
        .map(|(c, t)| multiply(c, t));
    let measured = GpuMeasurement {
        matmuls: f32.into_iter().chain(bf16).collect(),
        tf32,
        attention,
        copy_rate: device.stream_rate(),
        host_rates: [50e9, 40e9],
        kernel: 2e-6,
        launch: 1e-6,
        steps,
        tiny: small_step(&gpu, [6, 8]),
        tiniest: small_step(&gpu, [2, 8]),
        more_tokens: vec![small_step(&gpu, [6, 32])],
    };
    let found = fit_gpu(&Cluster::built_in("h200").unwrap(), &measured).unwrap();
    assert!(found.matmul_error < 1e-6, "{}", found.matmul_error);
    for (step, (with, _)) in measured.steps.iter().zip(&found.steps) {
        assert!((with - 1.0).abs() < 0.03, "{:?}: {with}", step.plan.model);
    }
    let fitted = &found.cluster.accelerator;
    let near = |found: f64, made: f64| (found / made - 1.0).abs() < 0.1;
    let points = fitted.short_kernel_us.0.iter().zip(&device.short_kernel_us.0);
    assert!(points.clone().count() == 2 && near(fitted.launch_us, 1.0));
    for ((tokens, found), (made_tokens, made)) in points {
        assert!(tokens == made_tokens && near(*found, *made), "{tokens}: {found}, not {made}");
    }
    assert!(near(fitted.step_us, 300.0), "{}", fitted.step_us);
    // A GPU on which no kernel is short.
    let mut fast = measured.clone();
    let tiny = [&mut fast.tiny, &mut fast.tiniest].into_iter();
    tiny.chain(&mut fast.more_tokens).for_each(|step| step.step = 1e-9);
    let fast = fit_gpu(&Cluster::built_in("h200").unwrap(), &fast).unwrap().cluster.accelerator;
    assert!(fast.short_kernel_us.is_empty() && fast.step_us == 0.0);
    assert_eq!(fitted.peak.bf16, 989.0, "that of the data sheet");
    let best = |overheads: &MatmulOverheads| [overheads.f32.best, overheads.tf32.unwrap().best];
    let found_best = best(fitted.matmul.overheads.as_ref().unwrap());
    assert!(found_best.iter().zip([0.8, 0.6]).all(|(a, b)| (a - b).abs() < 1e-6));
    // The file that `bench machine` writes has all of it.
    let text = toml::to_string(&found.cluster).unwrap();
    assert_eq!(Cluster::parse(&text).unwrap(), found.cluster);
    // A plan with TF32 is faster than one without.
    let seconds = |tf32: bool| {
        let text = format!(
            "[model]\npreset = \"gpt2-124m\"\n[train]\nmicro_batch = 4\nglobal_batch = 4\n[device]\nkind = \"cuda\"\ntf32 = {tf32}\n"
        );
        estimate(&gpu_plan(&text), &found.cluster, &Options::default()).step_s
    };
    assert!(seconds(true) < 0.7 * seconds(false));
}
