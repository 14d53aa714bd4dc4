//! Guards on file systems in user space.

use super::*;
use crate::support::mounts::Mount;
use crate::support::{eventually, PATIENCE};

#[test]
fn in_user_space_a_process_has_one_guard_of_a_lock() {
    let [bindfs, mkntfs, ntfs_3g] = needs!("bindfs", "mkntfs", "ntfs-3g");
    let admin = needs!(admin);
    for mount in [
        Mount::bindfs(admin, &bindfs),
        Mount::ntfs_3g(admin, &mkntfs, &ntfs_3g),
    ] {
        let path = mount.path.join("a.lock");
        let lock = || Semaphore::with_defaults(&path).expect("a lock path");
        for text in [None, Some(format!("pid={DEAD}\ntimestamp=1\n"))] {
            if let Some(text) = text {
                fs::write(&path, text).expect("a stale lock");
            }
            let (first, second) = (lock(), lock());
            let guard = first.try_acquire().expect("a free or stale lock");
            let error = second.try_acquire().expect_err("held");
            assert!(matches!(error, SemaphoreError::AlreadyLocked { .. }));
            assert!(matches!(second.status(), Ok(Status::Held(details)) if !details.is_stale));
            assert!(guard.is_held());
            guard.release().expect("it is held");
            // A process that another test starts has the file open until it runs its program.
            eventually(PATIENCE, "the file is gone", || {
                names(&mount.path).is_empty()
            });
        }
    }
}
