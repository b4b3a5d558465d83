pub(crate) struct Pulse;
