//! Lock files.

pub(crate) mod process;
pub(crate) mod uucp;
pub(crate) mod uucp_device;
pub(crate) mod uucp_files;
