//! How much of it a test does.

/// `full` if `LATCHD_TEST_FULL` is set, which takes minutes; `usual` otherwise.
pub fn amount<T>(usual: T, full: T) -> T {
    match std::env::var_os("LATCHD_TEST_FULL") {
        Some(_) => full,
        None => usual,
    }
}
