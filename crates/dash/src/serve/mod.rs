//! The web page over run folders. All assets are embedded, nothing is requested from other machines, and run folders are
//! only read, except for the file that asks a running job for a timeline. README.md documents the API.

mod api;
mod guard;
mod open_metrics;
mod series;
mod state;
mod traffic;

pub use series::{Points, Series};

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::response::{Html, IntoResponse};
use axum::routing::{get, post};

use guard::Access;
use state::Shared;

/// Run folders to serve, and the address.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Directories that contain run folders, or run folders.
    pub runs: Vec<PathBuf>,
    pub address: SocketAddr,
    /// Required for addresses other than loopback.
    pub token: Option<String>,
}

/// Serves until the process ends. `ready` is called with the address once connections are accepted.
pub fn serve(options: ServeOptions, ready: impl FnOnce(SocketAddr)) -> io::Result<()> {
    if !options.address.ip().is_loopback() && options.token.is_none() {
        let text =
            format!("{} is not a loopback address, so a token is required", options.address.ip());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::bind(options.address).await?;
        let address = listener.local_addr()?;
        ready(address);
        axum::serve(listener, router(options)).await
    })
}

fn router(options: ServeOptions) -> Router {
    let access = Access::new(options.token.clone(), options.address.ip().is_loopback());
    let shared = Shared::start(options.runs);
    Router::new()
        .route("/", get(|| async { Html(include_str!("assets/index.html")) }))
        .route("/assets/app.js", get(|| asset("text/javascript", include_str!("assets/app.js"))))
        .route("/assets/app.css", get(|| asset("text/css", include_str!("assets/app.css"))))
        .route(
            "/assets/uplot.js",
            get(|| asset("text/javascript", include_str!("assets/uPlot.iife.min.js"))),
        )
        .route("/assets/uplot.css", get(|| asset("text/css", include_str!("assets/uPlot.min.css"))))
        .route("/metrics", get(open_metrics::metrics))
        .route("/api/events", get(api::events))
        .route("/api/runs", get(api::runs))
        .route("/api/run", get(api::run))
        .route("/api/run/metrics", get(api::metrics))
        .route("/api/run/logs", get(api::logs))
        .route("/api/run/plan", get(api::plan))
        .route("/api/run/doctor", get(api::doctor))
        .route("/api/run/timeline", get(api::timeline))
        .route("/api/run/trace", post(api::request_trace))
        .with_state(shared)
        .layer(axum::middleware::from_fn_with_state(Arc::new(access), guard::check))
}

async fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "max-age=3600")], text)
}
