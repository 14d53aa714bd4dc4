//! Who may do what: the auth tokens, and the rights behind them.

pub mod rights;
pub mod tokens;
