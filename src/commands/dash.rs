//! `lockstep dash`: a web page over run folders.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// Serve a web page with all runs: charts, ranks, timelines, logs and the doctor's verdict
///
/// Everything is embedded, and no request leaves this machine. Run folders are only read. The API is at /api/runs, metrics
/// for Prometheus at /metrics.
#[derive(clap::Args)]
pub struct Args {
    /// Directories that contain run folders, or run folders
    #[arg(default_value = "runs")]
    runs: Vec<PathBuf>,
    /// Address to listen on; other addresses than loopback need --token
    #[arg(long, default_value = "127.0.0.1")]
    bind: IpAddr,
    /// Port; 0 chooses a free one
    #[arg(long, default_value_t = 8420)]
    port: u16,
    /// Secret that the address of the page must contain [default: none on loopback]
    #[arg(long, env = "LOCKSTEP_DASH_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

#[cfg(feature = "dash")]
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    use anyhow::Context as _;
    use lockstep_dash::serve::{ServeOptions, serve};

    use crate::print::print_line;

    let Args { runs, bind, port, token } = args;
    let query = token.as_ref().map_or(String::new(), |token| format!("?token={token}"));
    let options = ServeOptions { runs, address: (bind, port).into(), token };
    serve(options, |address| print_line!("http://{address}/{query}"))
        .with_context(|| format!("cannot serve on {bind} port {port}"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(not(feature = "dash"))]
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Args { runs: _, bind: _, port: _, token: _ } = args;
    anyhow::bail!(
        "this program was built without the web page; build it with `cargo build --release --features dash`"
    )
}

/// Serves the runs next to a training, on a free port of the loopback address.
#[cfg(feature = "dash")]
pub fn start(runs: PathBuf) -> anyhow::Result<()> {
    use lockstep_dash::serve::{ServeOptions, serve};

    use crate::print::print_error;

    let options =
        ServeOptions { runs: vec![runs], address: ([127, 0, 0, 1], 0).into(), token: None };
    let work = move || {
        let served = serve(options, |address| print_error!("dash: http://{address}/"));
        if let Err(error) = served {
            print_error!("warning: the web page is not available: {error}");
        }
    };
    std::thread::Builder::new().name("dash".into()).spawn(work)?;
    Ok(())
}

#[cfg(not(feature = "dash"))]
pub fn start(_: PathBuf) -> anyhow::Result<()> {
    anyhow::bail!("--dash needs the cargo feature dash: `cargo build --release --features dash`")
}
