//! Lock files of serial devices, in the tradition of UUCP.

pub mod device;
pub mod files;
mod lock_file;
pub mod mark;
pub mod names;
mod staleness;
