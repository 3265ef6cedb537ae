//! Aligned columns for people.

/// A table with a head. The columns named in `right` are aligned to the right.
pub struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// One without rows.
    pub fn new(head: &[&'static str]) -> Self {
        Table { head: head.to_vec(), rows: Vec::new() }
    }

    /// Adds a row, of as many cells as the head has.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([self.head[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        // A column is of numbers if every cell begins with a digit or is empty. Addresses are none.
        let number = |column: usize| {
            let mut cells =
                self.rows.iter().filter_map(|row| row.get(column)).filter(|cell| cell.as_str() != "-");
            !self.rows.is_empty()
                && cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit()) && !cell.contains(':'))
        };
        let right: Vec<bool> = (0..self.head.len()).map(number).collect();
        let mut line = |cells: &[&str]| {
            let mut text = String::new();
            for (column, cell) in cells.iter().enumerate() {
                let width = widths[column];
                if column > 0 {
                    text.push_str("  ");
                }
                if right[column] {
                    text.push_str(&format!("{cell:>width$}"));
                } else {
                    text.push_str(&format!("{cell:<width$}"));
                }
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(&self.head)?;
        for row in &self.rows {
            let cells: Vec<&str> = row.iter().map(String::as_str).collect();
            line(&cells)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", "SIZE"]);
        table.row(vec!["a".into(), "64M".into()]);
        table.row(vec!["longer".into(), "1G".into()]);
        assert_eq!(table.to_string(), "NAME    SIZE\na        64M\nlonger    1G\n");
    }
}
