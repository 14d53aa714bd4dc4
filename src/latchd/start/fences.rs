//! Where a single server gets its fences from: a file in which they are reserved, or the clock.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use log::warn;

use super::options::Options;
use crate::latchd::fence::allocator::{self, FenceFile, FenceRecord, Reserver};
use crate::latchd::fence::range::RANGE;
use crate::latchd::fence::source::{fence_of_clock, ClockFences};
use crate::latchd::state_file::Previous;
use crate::os::moment;
use crate::os::text::{reason, unusable_file};
use crate::wire::token::FenceSource;

/// The source of fences, and the reserver if they are reserved in files. The reserver runs in a
/// thread of its own.
pub type Fences = (Box<dyn FenceSource>, Option<Reserver>);

/// Opens the fence file, if there is one. If there is a state file, the caller must let the
/// reserver record the fences there, too.
pub fn open(
    fence_file: Option<&Path>,
    has_state_file: bool,
    previous: &Previous,
) -> Result<Fences, String> {
    let first = fence_of_clock(SystemTime::now()).max(previous.next_fence());
    let reserve = |first, records| allocator::reserve_from(first, RANGE, records);
    let reserved = match fence_file {
        Some(path) => FenceFile::open(path)
            .and_then(|(file, above_used)| {
                let record: Box<dyn FenceRecord> = Box::new(file);
                reserve(first.max(above_used), vec![record])
            })
            .map_err(|error| unusable_file("fence", path, reason(&error)))?,
        None if has_state_file => reserve(first, Vec::new()).map_err(|error| reason(&error))?,
        None => return Ok((Box::new(ClockFences::starting_at(first)), None)),
    };
    let (fences, reserver) = reserved;
    Ok((Box::new(fences), Some(reserver)))
}

/// Warns if fences begin at a clock that has never been set.
pub fn warn_of_clock(options: &Options) {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let has_files = options.fence_state_file.is_some() || options.state_file().is_some();
    if !has_files && since_epoch.unwrap_or_default() < moment::EARLIEST {
        warn!(
            "clock-not-set hint=\"fences begin at the clock, and so may repeat after a restart\""
        );
    }
}
