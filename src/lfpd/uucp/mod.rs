//! Lock files of serial devices, as UUCP began them.

pub mod device;
pub mod files;
pub mod mark;
pub mod names;
