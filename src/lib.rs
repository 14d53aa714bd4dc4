//! Locks, semaphores and leases in strict order of arrival, for hosts where everything is small.
#![forbid(unsafe_code)]

pub mod table;
